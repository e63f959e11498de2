//! Netlink messages and attributes as bytes. Reading takes any input and never panics.

/// An attribute's length is a 16-bit number; what does not fit is split before it comes here.
pub const ATTRIBUTE_BYTES_MAX: usize = u16::MAX as usize;

const NESTED: u16 = 0x8000;
const TYPE_MASK: u16 = 0x3fff;

#[derive(Debug, Default, Clone)]
pub struct Writer {
    pub bytes: Vec<u8>,
    /// Something did not fit. Nothing of this is sent.
    pub overflow: bool,
}

impl Writer {
    pub fn with_room(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), overflow: false }
    }

    pub fn put(&mut self, kind: u16, data: &[u8]) -> &mut Self {
        let start = self.open(kind);
        self.bytes.extend_from_slice(data);
        self.close(start)
    }

    fn open(&mut self, kind: u16) -> usize {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0, 0]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        start
    }

    fn close(&mut self, start: usize) -> &mut Self {
        match u16::try_from(self.bytes.len() - start) {
            Ok(length) => self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes()),
            Err(_) => self.overflow = true,
        }
        while !self.bytes.len().is_multiple_of(4) {
            self.bytes.push(0);
        }
        self
    }

    pub fn u8(&mut self, kind: u16, value: u8) -> &mut Self {
        self.put(kind, &[value])
    }

    pub fn u16(&mut self, kind: u16, value: u16) -> &mut Self {
        self.put(kind, &value.to_be_bytes())
    }

    pub fn u32(&mut self, kind: u16, value: u32) -> &mut Self {
        self.put(kind, &value.to_be_bytes())
    }

    pub fn u64(&mut self, kind: u16, value: u64) -> &mut Self {
        self.put(kind, &value.to_be_bytes())
    }

    pub fn text(&mut self, kind: u16, value: &str) -> &mut Self {
        let start = self.open(kind);
        self.bytes.extend_from_slice(value.as_bytes());
        self.bytes.push(0);
        self.close(start)
    }

    pub fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Writer)) -> &mut Self {
        let start = self.open(kind | NESTED);
        fill(self);
        self.close(start)
    }
}

/// The attributes in some bytes, until they end or make no sense.
#[derive(Debug, Clone, Copy)]
pub struct Attributes<'b>(pub &'b [u8]);

impl<'b> Iterator for Attributes<'b> {
    type Item = (u16, &'b [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let head = self.0.first_chunk::<4>()?;
        let length = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let kind = u16::from_ne_bytes([head[2], head[3]]) & TYPE_MASK;
        let data = self.0.get(4..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, data))
    }
}

impl<'b> Attributes<'b> {
    pub fn find(mut self, kind: u16) -> Option<&'b [u8]> {
        Iterator::find(&mut self, |(held, _)| *held == kind).map(|(_, data)| data)
    }

    pub fn u32(self, kind: u16) -> Option<u32> {
        self.find(kind).and_then(|data| Some(u32::from_be_bytes(*data.first_chunk()?)))
    }

    pub fn u64(self, kind: u16) -> Option<u64> {
        self.find(kind).and_then(|data| Some(u64::from_be_bytes(*data.first_chunk()?)))
    }

    pub fn text(self, kind: u16) -> Option<&'b str> {
        let data = self.find(kind)?;
        std::str::from_utf8(data.split(|b| *b == 0).next()?).ok()
    }

    pub fn nested(self, kind: u16) -> Attributes<'b> {
        Attributes(self.find(kind).unwrap_or_default())
    }
}

pub struct Message<'b> {
    pub kind: u16,
    pub flags: u16,
    /// Of a notification: the socket whose request it tells of.
    pub port: u32,
    pub body: &'b [u8],
}

/// The messages in a datagram.
pub struct Messages<'b>(pub &'b [u8]);

pub const MESSAGE_HEADER: usize = 16;

impl<'b> Iterator for Messages<'b> {
    type Item = Message<'b>;

    fn next(&mut self) -> Option<Self::Item> {
        let head = self.0.first_chunk::<MESSAGE_HEADER>()?;
        let length = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let kind = u16::from_ne_bytes([head[4], head[5]]);
        let flags = u16::from_ne_bytes([head[6], head[7]]);
        let port = u32::from_ne_bytes([head[12], head[13], head[14], head[15]]);
        let body = self.0.get(MESSAGE_HEADER..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Message { kind, flags, port, body })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_reads_back() {
        let mut writer = Writer::default();
        writer.u8(1, 7).u32(2, 0x0102_0304).text(3, "gc").nest(4, |inner| _ = inner.u64(1, u64::MAX).u16(2, 5));
        assert!(!writer.overflow && writer.bytes.len().is_multiple_of(4));
        let read = Attributes(&writer.bytes);
        assert_eq!(read.find(1), Some(&[7][..]));
        assert_eq!(read.u32(2), Some(0x0102_0304));
        assert_eq!(read.text(3), Some("gc"));
        assert_eq!(read.nested(4).u64(1), Some(u64::MAX));
        assert_eq!(read.find(5), None);
    }

    #[test]
    fn an_attribute_that_does_not_fit_is_noticed() {
        let mut writer = Writer::default();
        writer.put(1, &vec![0; ATTRIBUTE_BYTES_MAX - 4]);
        assert!(!writer.overflow);
        writer.put(1, &vec![0; ATTRIBUTE_BYTES_MAX - 3]);
        assert!(writer.overflow);
    }

    #[test]
    fn any_bytes_are_read_without_a_panic() {
        let mut state = 1u32;
        for length in 0..400usize {
            let bytes: Vec<u8> = (0..length)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    // Small lengths are more often plausible.
                    if state & 0x100 == 0 { (state >> 24) as u8 & 31 } else { (state >> 24) as u8 }
                })
                .collect();
            let read: usize = Messages(&bytes).map(|message| Attributes(message.body).count()).sum();
            assert!(read <= length);
            assert!(Attributes(&bytes).count() <= length / 4 + 1);
        }
    }
}
