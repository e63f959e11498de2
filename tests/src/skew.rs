//! A clock that is wrong, for one process: a library that is loaded before all others adds so many seconds to the time of day. Other clocks are
//! left alone. The machine's clock stays as it is, and so do those of programs that ask the kernel without libc, such as nats-server.

use std::path::{Path, PathBuf};
use std::process::Command;

const SECONDS: &str = "GROUPCAST_TEST_SKEW_SECONDS";
/// The kernel is asked itself, so that nothing has to be looked up.
const SOURCE: &str = r#"#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t seconds(void) {
    const char *text = getenv("GROUPCAST_TEST_SKEW_SECONDS");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t id, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, id, at);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        at->tv_sec += seconds();
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
"#;

/// The library.
pub struct Skew(PathBuf);

impl Skew {
    /// Builds it in this folder, with the compiler that the build needs anyway.
    pub fn build(folder: &Path) -> Result<Self, String> {
        let (source, library) = (folder.join("skew.c"), folder.join("skew.so"));
        std::fs::write(&source, SOURCE).map_err(|error| error.to_string())?;
        let mut cc = Command::new("cc");
        let built = cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).output();
        let built = built.map_err(|error| format!("cc: {error}"))?;
        match built.status.success() {
            true => Ok(Self(library)),
            false => Err(String::from_utf8_lossy(&built.stderr).into_owned()),
        }
    }

    /// Has the command see the time of day so many seconds from what it is.
    pub fn apply(&self, command: &mut Command, seconds: i64) {
        command.env("LD_PRELOAD", &self.0).env(SECONDS, seconds.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_day_is_another_and_nothing_else_is() {
        let folder = crate::gateway::Folder::new("skew");
        let skew = Skew::build(&folder.0).expect("built");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs() as i64;
        for seconds in [-600, 0, 600] {
            let mut date = Command::new("date");
            date.arg("+%s");
            skew.apply(&mut date, seconds);
            let said = date.output().expect("date runs").stdout;
            let said: i64 = String::from_utf8_lossy(&said).trim().parse().expect("seconds");
            assert!((said - now - seconds).abs() < 60, "{said} instead of {now} and {seconds}");
        }
    }
}
