//! `--layout`: the KV of an engine, as much of it as decides which bytes a read of some tokens is made of.

use std::{fmt, str::FromStr};

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// The largest number of a layout.
const MOST: u64 = 65_536;

/// Two buffers per layer (all K, then all V), each with a row per token slot; pages of slots are scattered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Layers on this rank.
    pub layers: u64,
    /// KV heads on this rank.
    pub heads: u64,
    /// Elements of a head.
    pub dim: u64,
    /// Bytes of an element.
    pub element: u64,
    /// Tokens of a page.
    pub page: u64,
}

impl Layout {
    /// Bytes of one token in one buffer.
    pub fn row(&self) -> u64 {
        self.heads * self.dim * self.element
    }

    /// K and V of every layer.
    pub fn buffers(&self) -> u64 {
        self.layers * 2
    }

    /// Bytes of one token in all buffers.
    pub fn token(&self) -> u64 {
        self.row() * self.buffers()
    }

    /// Refuses what cannot be, for one that comes from the other end: with these bounds nothing above overflows.
    pub fn check(&self) -> Result<()> {
        let Layout {
            layers,
            heads,
            dim,
            element,
            page,
        } = *self;
        let fields = [("layers", layers), ("heads", heads), ("dim", dim), ("page", page)];
        for (name, number) in fields {
            ensure!((1..=MOST).contains(&number), "{name} is {number}: give 1 to {MOST}");
        }
        ensure!(
            (1..=8).contains(&element),
            "an element has {element} bytes: give 1 to 8"
        );
        Ok(())
    }
}

impl FromStr for Layout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str = "write it as sglang:layers=48,heads=4,dim=128,dtype=bf16,page=1";
        let fields = text
            .strip_prefix("sglang:")
            .ok_or(format!("only sglang is known: {FORM}"))?;
        let (mut layers, mut heads, mut dim, mut element, mut page) = (None, None, None, None, Some(1));
        for field in fields.split(',') {
            let (name, value) = field
                .split_once('=')
                .ok_or(format!("{field:?} is no name=value: {FORM}"))?;
            if name == "dtype" {
                element = Some(element_bytes(value)?);
                continue;
            }
            let place = match name {
                "layers" => &mut layers,
                "heads" => &mut heads,
                "dim" => &mut dim,
                "page" => &mut page,
                _ => return Err(format!("{name:?} is not known: {FORM}")),
            };
            let number = value.parse().ok().filter(|number| (1..=MOST).contains(number));
            *place = Some(number.ok_or(format!("{name} is {value:?}: give 1 to {MOST}"))?);
        }
        let need = |name, field: Option<u64>| field.ok_or(format!("{name} is missing: {FORM}"));
        Ok(Layout {
            layers: need("layers", layers)?,
            heads: need("heads", heads)?,
            dim: need("dim", dim)?,
            element: need("dtype", element)?,
            page: need("page", page)?,
        })
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Layout {
            layers,
            heads,
            dim,
            page,
            ..
        } = self;
        write!(f, "{layers} layers, {heads} x {dim} x {} B, page {page}", self.element)
    }
}

fn element_bytes(dtype: &str) -> Result<u64, String> {
    match dtype {
        "fp32" | "float32" => Ok(4),
        "bf16" | "bfloat16" | "fp16" | "float16" => Ok(2),
        "fp8" | "float8_e4m3fn" | "float8_e5m2" => Ok(1),
        _ => Err(format!("dtype is {dtype:?}, expected fp32, bf16, fp16 or fp8")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_knows_the_bytes_of_a_token() {
        let layout: Layout = "sglang:layers=48,heads=4,dim=128,dtype=bf16,page=16".parse().unwrap();
        assert_eq!((layout.row(), layout.buffers(), layout.page), (1024, 96, 16));
        assert_eq!(layout.token(), 98_304);
    }

    #[test]
    fn what_is_missing_or_unknown_is_named_with_the_form() {
        let refused = |text: &str| text.parse::<Layout>().unwrap_err();
        assert!(refused("vllm:layers=1").starts_with("only sglang is known"));
        assert!(refused("sglang:layers=1,heads=1,dim=1").starts_with("dtype is missing: write it as"));
        assert!(refused("sglang:layers=0").starts_with("layers is \"0\": give 1 to 65536"));
        assert!(refused("sglang:blocks=1").starts_with("\"blocks\" is not known"));
        assert!(refused("sglang:layers=1,dtype=int4").contains("expected fp32, bf16"));
    }
}
