//! What was ordered on the local socket: which workloads are attached and how, and the mode. On disk before an order is answered, because
//! nobody else knows it: a policy comes back over the bus, an attachment does not. Small, so it is a file of its own, written whole.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::WrittenAttachment;
use crate::files::write_whole;
use crate::mode::Ordered;
use crate::state::StateError;

/// A host has thousands of workloads at most, each of a few hundred bytes.
const FILE_BYTES_MAX: u64 = 64 << 20;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orders {
    pub host: String,
    /// As the operator set it, with the reason; the configuration's otherwise.
    pub mode: Ordered,
    pub attachments: Vec<WrittenAttachment>,
}

impl Orders {
    /// Beside the last good state.
    pub fn path(state: &Path) -> PathBuf {
        state.with_extension("orders")
    }

    pub fn read(path: &Path) -> Result<Option<Self>, StateError> {
        match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
            Ok(metadata) if metadata.len() > FILE_BYTES_MAX => return Err(StateError::Damaged("too large")),
            Ok(_) => {}
        }
        serde_json::from_slice(&fs::read(path)?).map(Some).map_err(|_| StateError::Damaged("not what we write"))
    }

    pub fn write(&self, path: &Path) -> io::Result<()> {
        write_whole(path, &serde_json::to_vec(self)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_read_back_and_damage_is_noticed() {
        let folder = std::env::temp_dir().join(format!("groupcast-orders-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = Orders::path(&folder.join("state"));
        assert!(Orders::read(&path).unwrap().is_none());
        let attachment =
            WrittenAttachment { workload: "w1".into(), interface: "gcw1".into(), addresses: Default::default(), audit: true };
        let orders =
            Orders { host: "h0".into(), mode: Some(("freeze".into(), "maintenance".into())), attachments: vec![attachment] };
        orders.write(&path).unwrap();
        assert_eq!(Orders::read(&path).unwrap(), Some(orders));
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(matches!(Orders::read(&path), Err(StateError::Damaged(_))));
        fs::remove_dir_all(&folder).unwrap();
    }
}
