//! Lists of addresses, prefixes and ranges, in and out.

use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use super::shorten;
use crate::net::{AddressSet, Prefix, Span};

fn address(text: &str) -> Result<IpAddr, String> {
    text.parse().map_err(|_| {
        let zero = text.split('.').count() == 4 && text.split('.').any(|octet| octet.len() > 1 && octet.starts_with('0'));
        if zero {
            format!("{:?} has an octet with a leading zero, which some readers take for octal: write it without", shorten(text))
        } else {
            format!("{:?} is not an address: write one like 10.0.0.1 or 2001:db8::1", shorten(text))
        }
    })
}

/// An address or a prefix; host bits are cleared.
pub fn prefix_text(text: &str) -> Result<Prefix, String> {
    let Some((base, len)) = text.split_once('/') else { return Ok(Prefix::host(address(text)?)) };
    let base = address(base)?;
    let max = if base.is_ipv4() { 32 } else { 128 };
    let len = len.parse::<u8>().ok().filter(|l| *l <= max && !len.starts_with('+'));
    match len.and_then(|len| IpNet::new(base, len).ok()) {
        Some(net) => Ok(Prefix::new(net)),
        None => Err(format!("{:?} is not a prefix: the length must be 0 to {max}", shorten(text))),
    }
}

/// The same, and refuses what has bits after its length: it may be another network than was meant.
pub fn strict_prefix_text(text: &str) -> Result<Prefix, String> {
    let prefix = prefix_text(text)?;
    let Some((base, _)) = text.split_once('/') else { return Ok(prefix) };
    match address(base)? == prefix.net().addr() {
        true => Ok(prefix),
        false => Err(format!("{:?} has bits after its length: write {prefix}, or {base} if one address is meant", shorten(text))),
    }
}

fn add_item(text: &str, set: &mut Spans) -> Result<(), String> {
    let Some((first, last)) = text.split_once('-') else {
        match prefix_text(text)?.net() {
            IpNet::V4(net) => set.v4.extend(Span::new(net.network().to_bits(), net.broadcast().to_bits())),
            IpNet::V6(net) => set.v6.extend(Span::new(net.network().to_bits(), net.broadcast().to_bits())),
        }
        return Ok(());
    };
    let inverted = || format!("range {:?} is inverted: write the lower address first", shorten(text));
    match (address(first)?, address(last)?) {
        (IpAddr::V4(a), IpAddr::V4(b)) => set.v4.push(Span::new(a.to_bits(), b.to_bits()).ok_or_else(inverted)?),
        (IpAddr::V6(a), IpAddr::V6(b)) => set.v6.push(Span::new(a.to_bits(), b.to_bits()).ok_or_else(inverted)?),
        _ => return Err(format!("range {:?} mixes IPv4 and IPv6: use one family for both ends", shorten(text))),
    }
    Ok(())
}

#[derive(Default)]
struct Spans {
    v4: Vec<Span<u32>>,
    v6: Vec<Span<u128>>,
}

/// Every item is checked, so that all bad ones are told at once.
pub fn address_list<'a>(items: impl IntoIterator<Item = &'a str>) -> Result<AddressSet, Vec<String>> {
    let mut spans = Spans::default();
    let mut errors = Vec::new();
    for item in items {
        if item.is_empty() {
            errors.push("an item of the list is empty: remove the extra comma".to_string());
        } else if let Err(error) = add_item(item, &mut spans) {
            errors.push(error);
        }
    }
    if errors.is_empty() {
        Ok(AddressSet { v4: spans.v4.into_iter().collect(), v6: spans.v6.into_iter().collect() })
    } else {
        Err(errors)
    }
}

/// The fewest prefixes that hold exactly the set.
pub fn prefix_list(set: &AddressSet) -> Vec<Prefix> {
    let mut list = Vec::new();
    for span in set.v4.spans() {
        blocks(u128::from(span.first()), u128::from(span.last()), 32, |bits, len| list.extend(Prefix::v4(bits as u32, len)));
    }
    for span in set.v6.spans() {
        blocks(span.first(), span.last(), 128, |bits, len| list.extend(Prefix::v6(bits, len)));
    }
    list
}

/// Cuts a range into aligned blocks.
fn blocks(mut first: u128, last: u128, width: u32, mut put: impl FnMut(u128, u8)) {
    loop {
        let aligned = if first == 0 { width } else { first.trailing_zeros().min(width) };
        let left = last - first;
        // The largest block that fits: 2^size addresses, of which left + 1 remain.
        let fits = if left == u128::MAX { 128 } else { (left + 1).ilog2() };
        let size = aligned.min(fits);
        put(first, (width - size) as u8);
        let step = if size >= 128 { u128::MAX } else { (1u128 << size) - 1 };
        if left <= step {
            return;
        }
        first += step + 1;
    }
}

/// Prefixes where the ranges are prefixes, `a-b` elsewhere.
pub fn address_text(set: &AddressSet) -> String {
    let mut out = String::new();
    let mut item = |text: std::fmt::Arguments<'_>| {
        if !out.is_empty() {
            out.push(',');
        }
        // Writing to a string cannot fail.
        let _ = out.write_fmt(text);
    };
    for span in set.v4.spans() {
        let (first, last) = (Ipv4Addr::from_bits(span.first()), Ipv4Addr::from_bits(span.last()));
        match block_len(u128::from(span.first()), u128::from(span.last()), 32) {
            Some(len) => item(format_args!("{first}/{len}")),
            None => item(format_args!("{first}-{last}")),
        }
    }
    for span in set.v6.spans() {
        let (first, last) = (Ipv6Addr::from_bits(span.first()), Ipv6Addr::from_bits(span.last()));
        match block_len(span.first(), span.last(), 128) {
            Some(len) => item(format_args!("{first}/{len}")),
            None => item(format_args!("{first}-{last}")),
        }
    }
    out
}

fn block_len(first: u128, last: u128, width: u8) -> Option<u8> {
    let mask = last - first;
    // A block is 2^n addresses that starts at a multiple of 2^n.
    let is_block = mask & mask.wrapping_add(1) == 0 && first & mask == 0;
    is_block.then(|| width - (128 - mask.leading_zeros()) as u8)
}
