//! What the machine itself says.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;

use groupcast_policy::net::Family;

/// A number that nobody can guess, from the kernel.
pub fn random() -> std::io::Result<u64> {
    use std::io::Read;
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// How many connections the kernel tracks for this network namespace.
pub fn flows() -> Option<u64> {
    std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count").ok()?.trim().parse().ok()
}

/// That the machine forwards nothing of a family, if it does not, and what to do about it.
pub fn not_forwarding(family: Family) -> Option<String> {
    let (path, name) = match family {
        Family::V4 => ("/proc/sys/net/ipv4/ip_forward", "net.ipv4.ip_forward"),
        Family::V6 => ("/proc/sys/net/ipv6/conf/all/forwarding", "net.ipv6.conf.all.forwarding"),
    };
    let value = std::fs::read_to_string(path).ok()?;
    (value.trim() == "0").then(|| {
        format!("{name} is 0: workloads reach this machine at most, and nobody beyond it; `sysctl -w {name}=1` if they should")
    })
}

/// Which boot of the machine this is: the same for every agent until it is started anew. Read from where the kernel says so, or from a
/// file that stands in for it where machines share a kernel.
pub fn boot(path: &Path) -> std::io::Result<u64> {
    let text = std::fs::read_to_string(path)?;
    let text = text.trim();
    if text.is_empty() {
        return Err(std::io::Error::other(format!("{} is empty: it should say which boot this is", path.display())));
    }
    Ok(xxhash_rust::xxh3::xxh3_64(text.as_bytes()))
}

/// The machine's own addresses, without loopback and those that mean nothing beyond a link.
pub fn addresses() -> BTreeSet<IpAddr> {
    let is_own = |address: &IpAddr| match address {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local() && !v4.is_unspecified(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local() && !v6.is_unspecified(),
    };
    all_addresses().into_iter().filter(is_own).collect()
}

/// Every address that leads to this machine.
pub fn all_addresses() -> BTreeSet<IpAddr> {
    let Ok(interfaces) = nix::ifaddrs::getifaddrs() else { return BTreeSet::new() };
    let address = |interface: nix::ifaddrs::InterfaceAddress| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    };
    interfaces.filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_is_what_the_kernel_says() {
        let kernel = Path::new("/proc/sys/kernel/random/boot_id");
        assert_eq!(boot(kernel).unwrap(), boot(kernel).unwrap());
        assert!(boot(Path::new("/nonexistent")).is_err());
        assert!(boot(Path::new("/dev/null")).is_err());
        assert!(addresses().iter().all(|address| !address.is_loopback()));
    }
}
