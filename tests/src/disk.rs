//! A disk of its own that can lose its power: an ext4 file system in a file. A cut drops whatever was not flushed, as a power cut does.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Room on one of them; the file is sparse. The server sets the whole of AUDIT aside.
const DISK_BYTES: u64 = 4 << 30;
/// `EXT4_IOC_SHUTDOWN` with `EXT4_GOING_FLAGS_NOLOGFLUSH`: the file system stops at once, and writes neither its journal nor what it
/// still has in memory. xfstests simulates power cuts in the same way. perl, because the ioctl needs no code of ours then.
const SHUTDOWN: &str = r#"open(my $at, "<", $ARGV[0]) or die "open: $!"; my $flags = pack("L", 2); ioctl($at, 0x8004587d, $flags) or die "ioctl: $!";"#;

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let ran = Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    match ran.status.success() {
        true => Ok(()),
        false => Err(format!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&ran.stderr).trim())),
    }
}

pub struct Disk {
    image: PathBuf,
    at: PathBuf,
    mounted: bool,
    /// How often its power came back.
    lives: u32,
}

impl Disk {
    /// Makes one and mounts it there. Needs root and loop devices.
    pub fn mount(image: &Path, at: &Path) -> Result<Self, String> {
        let failed = |error: std::io::Error| error.to_string();
        std::fs::create_dir_all(at).map_err(failed)?;
        std::fs::File::create(image).and_then(|file| file.set_len(DISK_BYTES)).map_err(failed)?;
        run("mkfs.ext4", &["-q", "-F", &image.display().to_string()])?;
        let mut disk = Self { image: image.to_owned(), at: at.to_owned(), mounted: false, lives: 0 };
        disk.plug()?;
        Ok(disk)
    }

    fn plug(&mut self) -> Result<(), String> {
        // The journal is written when somebody asks for it, not every five seconds: nobody is saved by chance.
        let (image, at) = (self.image.display().to_string(), self.at.display().to_string());
        run("mount", &["-t", "ext4", "-o", "loop,commit=300", &image, &at])?;
        self.mounted = true;
        Ok(())
    }

    /// Takes all the room that is left.
    pub fn fill(&self) -> Result<(), String> {
        let ballast = self.at.join("ballast").display().to_string();
        // What can be reserved at once, then what is left of it.
        for size in ["1G", "256M", "64M", "16M", "4M", "1M", "256K", "64K", "16K", "4K"] {
            while run("fallocate", &["--offset", &self.ballast().to_string(), "--length", size, &ballast]).is_ok() {}
        }
        if self.ballast() == 0 { Err(format!("{ballast} could not be made")) } else { Ok(()) }
    }

    /// Gives back what [`Disk::fill`] took.
    pub fn free(&self) -> Result<(), String> {
        std::fs::remove_file(self.at.join("ballast")).map_err(|error| error.to_string())
    }

    fn ballast(&self) -> u64 {
        std::fs::metadata(self.at.join("ballast")).map_or(0, |about| about.len())
    }

    /// The power goes. Whatever is asked of the disk from now on fails.
    pub fn cut(&self) -> Result<(), String> {
        run("perl", &["-e", SHUTDOWN, &self.at.display().to_string()])
    }

    /// The power is back: the journal is replayed. On a copy of what reached the disk, because another test's mount namespace may still hold
    /// the file system that was cut, and to mount its image again would bring that back.
    pub fn restore(&mut self) -> Result<(), String> {
        run("umount", &["--lazy", &self.at.display().to_string()])?;
        self.mounted = false;
        self.lives += 1;
        let copy = self.image.with_extension(self.lives.to_string());
        run("cp", &["--sparse=always", &self.image.display().to_string(), &copy.display().to_string()])?;
        std::fs::remove_file(&self.image).map_err(|error| error.to_string())?;
        self.image = copy;
        self.plug()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.mounted
            && let Err(error) = run("umount", &["--lazy", &self.at.display().to_string()])
        {
            eprintln!("{error}");
        }
        let _ = std::fs::remove_file(&self.image);
    }
}
