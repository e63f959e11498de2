//! The kernel as an [`Enforcer`]: one transaction is one netlink datagram, errors name the operation and carry the kernel's words, and
//! the table reads back as what was written.

mod conntrack;
mod expressions;
mod foreign;
mod legacy;
mod links;
mod probe;
mod read;
mod sets;
mod socket;
mod transaction;
mod watch;
mod wire;

#[cfg(test)]
mod tests;

use std::fmt;
use std::io;

use groupcast_enforce::Name;
use groupcast_enforce::delta::{Op, Transaction};
use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::table::{Chain, Table};

use crate::holder::Holder;
use socket::{Complaint, Transport};
use transaction::{Encoder, Handles, needs_handles};
use watch::Watch;

pub use foreign::Foreign;
pub use links::{Links, Master, Present};
pub use probe::Missing;

/// Others get EPERM; the table survives our death and is adopted again. Kernel 6.9 or newer.
const FLAGS_OWNED: u32 = 2 | 4;

#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("netlink: {0}; the old ruleset stays in force")]
    Io(#[from] io::Error),
    #[error("the kernel refused the transaction, the old ruleset stays in force: {}", Listed(.0))]
    Refused(Vec<Refused>),
    #[error(
        "table {table} holds what is not ours to understand ({what}): remove it with `nft delete table inet {table}`, or name another"
    )]
    Strange { table: String, what: String },
}

impl KernelError {
    /// Whether what we think is there may not be what is there.
    pub fn is_inconsistent(&self) -> bool {
        let gone = [nix::libc::ENOENT, nix::libc::EEXIST];
        matches!(self, KernelError::Refused(list) if list.iter().any(|refused| gone.contains(&refused.errno)))
    }
}

impl KernelError {
    /// Whether nothing was done because the table has another owner.
    pub fn is_anothers(&self) -> bool {
        matches!(self, KernelError::Refused(list) if list.iter().all(|refused| refused.errno == nix::libc::EPERM))
    }
}

/// One operation that the kernel refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub op: String,
    pub errno: i32,
    pub words: Option<String>,
}

/// How many complaints are printed; of a large transaction there may be thousands.
const COMPLAINTS_PRINTED_MAX: usize = 5;

struct Listed<'l>(&'l [Refused]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, refused) in self.0.iter().take(COMPLAINTS_PRINTED_MAX).enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{}: {}", refused.op, io::Error::from_raw_os_error(refused.errno))?;
            if let Some(words) = &refused.words {
                write!(f, " ({words})")?;
            }
        }
        let more = self.0.len().saturating_sub(COMPLAINTS_PRINTED_MAX);
        if more > 0 {
            write!(f, "; and {more} more")?;
        }
        Ok(())
    }
}

/// What a rule has met.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Counted {
    pub chain: String,
    pub at: usize,
    pub packets: u64,
    pub bytes: u64,
}

pub struct Kernel {
    transport: Transport,
    table: String,
    flags: u32,
    known: bool,
    /// Whether a table of the bridge family is there, and whether the kernel can have one.
    bridged: bool,
    leftover: bool,
    closes_ports: bool,
    handles: Handles,
    /// Where the kernel does not keep others away from the table.
    watch: Option<Watch>,
}

impl Kernel {
    /// For the network namespace of the calling thread. `owned`: nobody else may touch the table.
    pub fn open(table: &str, owned: bool) -> Result<Self, KernelError> {
        let transport = Transport::open()?;
        let flags = if owned { FLAGS_OWNED } else { 0 };
        let (handles, table) = (Handles::new(), table.to_owned());
        Ok(Self {
            transport,
            table,
            flags,
            known: false,
            bridged: false,
            leftover: false,
            closes_ports: true,
            handles,
            watch: None,
        })
    }

    /// Whether nobody else may touch the table. The first commit finds out whether the kernel can do that.
    pub fn is_owned(&self) -> bool {
        self.flags != 0
    }

    /// Packets and bytes that each rule with a counter has met, by chain and place.
    pub fn counters(&mut self) -> Result<Vec<Counted>, KernelError> {
        Ok(read::counters(&mut self.transport, &self.table)?)
    }

    /// What this kernel lacks. Leaves nothing behind.
    pub fn probe(&mut self) -> Result<Vec<Missing>, KernelError> {
        let missing = probe::run(&mut self.transport, &self.table)?;
        self.closes_ports = !missing.iter().any(|missing| missing.feature == probe::BRIDGED);
        Ok(missing)
    }

    /// What others have there that interferes; `mask`: our bits of connections' marks.
    pub fn foreign(&mut self, mask: u32) -> Foreign {
        foreign::read(&mut self.transport, &self.table, mask)
    }

    /// A transaction that needs no handles, ready to be sent: what a bare program would send.
    pub(crate) fn prepared(&self, transaction: &Transaction) -> socket::Batch {
        let encoder = Encoder { table: &self.table, flags: self.flags, known: true, bridged: true, leftover: false };
        encoder.encode(transaction, &mut Handles::new()).batch
    }

    /// How many complaints there were.
    pub(crate) fn send(&mut self, batch: socket::Batch) -> Result<usize, KernelError> {
        Ok(self.transport.commit(batch)?.complaints.len())
    }

    /// Takes the table away, if it is there and ours to take. Nothing else is touched.
    pub fn remove(&mut self) -> Result<(), KernelError> {
        self.handles.clear();
        self.known = false;
        self.bridged = false;
        self.leftover = false;
        let mut batch = socket::Batch::default();
        for (number, family) in
            [(socket::INET, rustables::ProtocolFamily::Inet), (socket::BRIDGE, rustables::ProtocolFamily::Bridge)]
        {
            if read::table_flags(&mut self.transport, number, &self.table)?.is_none() {
                continue;
            }
            let mut part = rustables::Batch::new();
            let table = rustables::Table::new(family).with_name(self.table.as_str()).with_flags(self.flags);
            part.add(&table, rustables::MsgType::Add);
            part.add(&table, rustables::MsgType::Del);
            batch.splice(part);
        }
        if batch.messages() == 0 {
            return Ok(());
        }
        let complaints = self.transport.commit(batch)?.complaints;
        self.judge(complaints, &[None; 4], &Transaction::default())
    }

    /// A kernel before 6.9 knows no owned tables: refused by exactly the message that asks for one.
    fn refuses_owner(&self, complaints: &[Complaint], origin: &[Option<usize>]) -> bool {
        let about_table = |complaint: &Complaint| complaint.message.and_then(|message| origin.get(message)) == Some(&None);
        let unknown = [nix::libc::EOPNOTSUPP, nix::libc::EINVAL];
        self.flags != 0 && complaints.iter().any(|complaint| about_table(complaint) && unknown.contains(&complaint.errno))
    }

    fn judge(&self, complaints: Vec<Complaint>, origin: &[Option<usize>], transaction: &Transaction) -> Result<(), KernelError> {
        if complaints.is_empty() {
            return Ok(());
        }
        let refused = complaints.into_iter().map(|complaint| {
            let op = complaint.message.and_then(|message| origin.get(message).copied());
            let op = match op.map(|index| index.and_then(|index| transaction.ops.get(index))) {
                Some(Some(op)) => op_name(op),
                Some(None) => format!("table {}", self.table),
                None => "the transaction as a whole".into(),
            };
            Refused { op, errno: complaint.errno, words: complaint.words }
        });
        Err(KernelError::Refused(refused.collect()))
    }
}

fn op_name(op: &Op) -> String {
    match op {
        Op::AddSet { set, .. } => format!("add set {set}"),
        Op::DeleteSet { set } => format!("delete set {set}"),
        Op::AddChain { chain, .. } => format!("add chain {chain}"),
        Op::DeleteChain { chain } => format!("delete chain {chain}"),
        Op::FlushChain { chain } => format!("flush chain {chain}"),
        Op::AddRule { chain, at, .. } => format!("add rule {at} to chain {chain}"),
        Op::DeleteRule { chain, at } => format!("delete rule {at} of chain {chain}"),
        Op::AddElements { set, elements, .. } => format!("add {} elements to set {set}", elements.len()),
        Op::DeleteElements { set, elements, .. } => format!("delete {} elements of set {set}", elements.len()),
    }
}

impl Enforcer for Kernel {
    type Error = KernelError;

    fn commit(&mut self, transaction: &Transaction) -> Result<(), KernelError> {
        if transaction.anew {
            self.handles.clear();
        }
        for chain in needs_handles(transaction) {
            if !self.handles.contains_key(chain) {
                let handles = read::handles(&mut self.transport, &self.table, chain)?;
                self.handles.insert(chain.clone(), handles);
            }
        }
        let encoder =
            Encoder { table: &self.table, flags: self.flags, known: self.known, bridged: self.bridged, leftover: self.leftover };
        let encoded = encoder.encode(transaction, &mut self.handles);
        let reply = match self.transport.commit(encoded.batch) {
            Ok(reply) => reply,
            Err(error) => {
                self.handles.clear();
                return Err(error.into());
            }
        };
        if self.refuses_owner(&reply.complaints, &encoded.origin) {
            self.flags = 0;
            self.handles.clear();
            return self.commit(transaction);
        }
        if let Err(error) = self.judge(reply.complaints, &encoded.origin, transaction) {
            self.handles.clear();
            return Err(error);
        }
        self.known = true;
        self.bridged |= transaction::is_about_bridge(transaction);
        self.leftover = false;
        match (self.is_owned(), &self.watch) {
            (true, _) => self.watch = None,
            (false, None) => self.watch = Some(Watch::open()?),
            (false, Some(_)) => {}
        }
        transaction::settle(&mut self.handles, &encoded.touched, &encoded.echoed, &reply.handles);
        Ok(())
    }

    fn read(&mut self) -> Result<Option<Table>, KernelError> {
        let Some(read) = read::table(&mut self.transport, &self.table)? else {
            self.known = false;
            self.bridged = false;
            self.leftover = read::table_flags(&mut self.transport, socket::BRIDGE, &self.table)?.is_some();
            return Ok(None);
        };
        self.leftover = false;
        self.bridged = read.bridged;
        if !read.strange.0.is_empty() {
            let what = read.strange.0.join(", ");
            return Err(KernelError::Strange { table: self.table.clone(), what });
        }
        Ok(Some(read.table))
    }
}

impl Holder for Kernel {
    fn zero_marks(&mut self, mask: u32, keep: &[u32]) -> Result<u64, KernelError> {
        Ok(conntrack::zero(&mut self.transport, mask, keep)?)
    }

    fn counters(&mut self) -> Result<Vec<Counted>, KernelError> {
        Kernel::counters(self)
    }

    fn foreign(&mut self, mask: u32) -> Foreign {
        Kernel::foreign(self, mask)
    }

    fn found(&mut self) -> Result<Table, KernelError> {
        match self.read() {
            Err(KernelError::Strange { .. }) => {
                let strange = (Name::from("strange"), Chain::default());
                Ok(Table { chains: [strange].into(), ..Table::default() })
            }
            found => Ok(found?.unwrap_or_default()),
        }
    }

    fn closes_ports(&self) -> bool {
        self.closes_ports
    }

    fn is_disturbed(&mut self) -> bool {
        let own = self.transport.port();
        // What cannot be heard may have been anything.
        self.watch.as_mut().is_some_and(|watch| watch.is_disturbed(&self.table, own).unwrap_or(true))
    }
}
