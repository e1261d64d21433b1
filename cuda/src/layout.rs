//! [`KvLayout`]: the buffers that hold one token's keys and values. Made by the engine's adapter once per rank, read by
//! `engine-ext` (registration, handshake, plans).

use std::{any::Any, fmt, os::fd::OwnedFd, sync::Arc};

use crate::shared::SharedMemory;

/// One of the engine's KV buffers: `slots` rows of `row` bytes, row `s` belonging to token slot `s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Address of row 0, on [`KvLayout::device`].
    pub base: u64,
    /// Bytes of one token's row.
    pub row: u32,
    /// Rows, including any the engine never hands out.
    pub slots: u32,
}

impl Buffer {
    /// Bytes in all.
    pub fn len(&self) -> u64 {
        u64::from(self.row) * u64::from(self.slots)
    }

    /// Whether it holds nothing; never true in a [`KvLayout`].
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where a buffer's bytes lie in a memfd, so that other processes of the host can map them too.
#[derive(Clone, Debug)]
pub struct Backing {
    /// The memfd; the buffer is a shared mapping of it.
    pub file: Arc<OwnedFd>,
    /// Byte of row 0 in it.
    pub offset: u64,
}

/// The type of one KV element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE 754 binary32.
    Float32,
    /// IEEE 754 binary16.
    Float16,
    /// bfloat16.
    Bfloat16,
    /// 8 bits, 4 exponent bits, finite only.
    Float8E4m3,
    /// 8 bits, 5 exponent bits.
    Float8E5m2,
}

impl Dtype {
    /// Its name, as torch writes it without the `torch.` prefix.
    pub const fn as_str(self) -> &'static str {
        match self {
            Dtype::Float32 => "float32",
            Dtype::Float16 => "float16",
            Dtype::Bfloat16 => "bfloat16",
            Dtype::Float8E4m3 => "float8_e4m3fn",
            Dtype::Float8E5m2 => "float8_e5m2",
        }
    }

    /// The type with that name.
    pub fn parse(name: &str) -> Option<Self> {
        [
            Dtype::Float32,
            Dtype::Float16,
            Dtype::Bfloat16,
            Dtype::Float8E4m3,
            Dtype::Float8E5m2,
        ]
        .into_iter()
        .find(|d| d.as_str() == name)
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> u32 {
        match self {
            Dtype::Float32 => 4,
            Dtype::Float16 | Dtype::Bfloat16 => 2,
            Dtype::Float8E4m3 | Dtype::Float8E5m2 => 1,
        }
    }
}

/// Where the buffers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// Ordinary memory of this process.
    Host,
    /// A CUDA device by ordinal.
    Cuda(u32),
}

/// What the buffers mean, without addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Element type.
    pub dtype: Dtype,
    /// Layers on this rank.
    pub layers: u32,
    /// KV heads on this rank.
    pub heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Tokens per page.
    pub page_tokens: u32,
    /// Tensor-parallel rank and size.
    pub tp: (u32, u32),
}

impl Shape {
    /// Bytes of one token's K (or V) in one layer.
    pub const fn row(&self) -> u32 {
        self.dtype.bytes() * self.heads * self.head_dim
    }
}

/// Where the KV of every token slot of one rank lies: first the K buffers of all layers, then the V buffers.
///
/// A value that exists is consistent: two buffers per layer, each with the shape's row, all with equally many slots.
#[derive(Clone)]
pub struct KvLayout {
    shape: Shape,
    device: Device,
    buffers: Arc<[Buffer]>,
    slots: u32,
    /// One per buffer, or none at all.
    backing: Option<Arc<[Backing]>>,
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// Why buffers are no [`KvLayout`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A number of the shape is zero, or the shape is out of all proportion.
    #[error("{field} is {got}, allowed is {limit}")]
    Field {
        /// Which.
        field: &'static str,
        /// As given.
        got: u64,
        /// What is allowed.
        limit: &'static str,
    },
    /// Not two buffers per layer.
    #[error("{layers} layers need {} buffers (all K, then all V), got {got}", layers * 2)]
    Buffers {
        /// Layers.
        layers: u32,
        /// Buffers given.
        got: usize,
    },
    /// A buffer differs from what the shape says, or from the others.
    #[error("buffer {index}: {field} is {got}, expected {expected}")]
    Buffer {
        /// Which.
        index: usize,
        /// What differs.
        field: &'static str,
        /// As given.
        got: u64,
        /// From the shape or from buffer 0.
        expected: u64,
    },
    /// Not one file per buffer.
    #[error("{buffers} buffers need as many backing files, got {got}")]
    Backings {
        /// Buffers.
        buffers: usize,
        /// Files given.
        got: usize,
    },
    /// A buffer that should lie in shared memory does not.
    #[error("buffer {index} lies outside the shared memory")]
    Outside {
        /// Which.
        index: usize,
    },
    /// Only host memory is shared by file.
    #[error("buffers on {device:?} have no backing files")]
    NotHost {
        /// Where they are.
        device: Device,
    },
}

impl KvLayout {
    /// Describes buffers that the engine owns: all K buffers in layer order, then all V buffers.
    ///
    /// # Errors
    /// [`LayoutError`] names the buffer and the number that does not fit.
    ///
    /// # Safety
    /// Obligation 1 of style 11: every buffer is mapped, readable and writable on `device` for as long as this layout
    /// or a clone of it lives, and longer than every mover that it was registered with. Obligation 4: slots under a
    /// lease are not written, slots of a running import are touched by nobody else.
    pub unsafe fn from_raw(shape: Shape, device: Device, buffers: Vec<Buffer>) -> Result<Self, LayoutError> {
        Self::checked(shape, device, buffers, None)
    }

    pub(crate) fn checked(
        shape: Shape,
        device: Device,
        buffers: Vec<Buffer>,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Self, LayoutError> {
        let row = checked_row(&shape)?;
        if u64::from(shape.layers) * 2 != buffers.len() as u64 {
            return Err(LayoutError::Buffers {
                layers: shape.layers,
                got: buffers.len(),
            });
        }
        let slots = buffers.first().map_or(0, |b| b.slots);
        if slots == 0 {
            return Err(LayoutError::Field {
                field: "slots",
                got: 0,
                limit: "1 or more",
            });
        }
        for (index, buffer) in buffers.iter().enumerate() {
            let differs = |field, got: u64, expected: u64| LayoutError::Buffer {
                index,
                field,
                got,
                expected,
            };
            if buffer.row != row {
                return Err(differs("row", buffer.row.into(), row.into()));
            }
            if buffer.slots != slots {
                return Err(differs("slots", buffer.slots.into(), slots.into()));
            }
            if buffer.base == 0 || buffer.base.checked_add(buffer.len()).is_none() {
                return Err(differs("base", buffer.base, 1));
            }
        }
        Ok(Self {
            shape,
            device,
            buffers: buffers.into(),
            slots,
            backing: None,
            _owner: owner,
        })
    }

    /// Says which file each buffer is a shared mapping of, in the order of [`KvLayout::buffers`]. What peers compare
    /// ([`KvLayout::fingerprint`]) stays.
    ///
    /// # Errors
    /// [`LayoutError::Backings`], [`LayoutError::NotHost`]. That the files reach far enough and can be sealed is looked
    /// at where they are registered.
    pub fn with_backing(self, files: Vec<Backing>) -> Result<Self, LayoutError> {
        if self.device != Device::Host {
            return Err(LayoutError::NotHost { device: self.device });
        }
        if files.len() != self.buffers.len() {
            return Err(LayoutError::Backings {
                buffers: self.buffers.len(),
                got: files.len(),
            });
        }
        let backing = Some(files.into());
        Ok(Self { backing, ..self })
    }

    /// As [`KvLayout::with_backing`], for buffers that all lie in `memory`.
    ///
    /// # Errors
    /// [`LayoutError::Outside`] names the first that does not; [`LayoutError::NotHost`].
    pub fn within(self, memory: &SharedMemory) -> Result<Self, LayoutError> {
        let file = |(index, buffer)| memory.backing(buffer).ok_or(LayoutError::Outside { index });
        let files = self.buffers.iter().enumerate().map(file).collect::<Result<_, _>>()?;
        self.with_backing(files)
    }

    /// What the buffers mean.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Where they are.
    pub fn device(&self) -> Device {
        self.device
    }

    /// K of every layer, then V of every layer.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// The file that buffer `index` is a shared mapping of, if it is one.
    pub fn backing(&self, index: usize) -> Option<&Backing> {
        self.backing.as_ref()?.get(index)
    }

    /// Rows in each buffer.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes of one token over all buffers.
    pub fn token_bytes(&self) -> u64 {
        self.buffers.iter().map(|b| u64::from(b.row)).sum()
    }

    /// What two workers must have in common to exchange KV (XFER-6, F21): element type, layers, heads and head size per
    /// rank, tensor-parallel shape, order of K and V. Not in it: addresses, pool size, and the page size, since every
    /// token slot is a row of its own and the importer's pages need not be the exporter's.
    pub fn fingerprint(&self) -> String {
        let s = &self.shape;
        format!(
            "kv1/{}/layers={}/heads={}/dim={}/tp={}of{}/order=k*v*",
            s.dtype.as_str(),
            s.layers,
            s.heads,
            s.head_dim,
            s.tp.0,
            s.tp.1
        )
    }
}

impl fmt::Debug for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvLayout")
            .field("shape", &self.shape)
            .field("device", &self.device)
            .field("buffers", &self.buffers.len())
            .field("slots", &self.slots)
            .field("shared", &self.backing.is_some())
            .finish()
    }
}

fn checked_row(shape: &Shape) -> Result<u32, LayoutError> {
    for (field, got) in [
        ("layers", shape.layers),
        ("heads", shape.heads),
        ("head_dim", shape.head_dim),
        ("page_tokens", shape.page_tokens),
        ("tp size", shape.tp.1),
    ] {
        if got == 0 || got > 1 << 20 {
            return Err(LayoutError::Field {
                field,
                got: got.into(),
                limit: "1 to 1048576",
            });
        }
    }
    if shape.tp.0 >= shape.tp.1 {
        return Err(LayoutError::Field {
            field: "tp rank",
            got: shape.tp.0.into(),
            limit: "less than tp size",
        });
    }
    let row = u64::from(shape.dtype.bytes()) * u64::from(shape.heads) * u64::from(shape.head_dim);
    u32::try_from(row).map_err(|_| LayoutError::Field {
        field: "row",
        got: row,
        limit: "less than 4 GiB",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        dtype: Dtype::Bfloat16,
        layers: 2,
        heads: 4,
        head_dim: 8,
        page_tokens: 16,
        tp: (0, 1),
    };

    fn buffers(n: usize) -> Vec<Buffer> {
        (1..=n as u64)
            .map(|i| Buffer {
                base: i << 20,
                row: 64,
                slots: 100,
            })
            .collect()
    }

    fn layout(shape: Shape, buffers: Vec<Buffer>) -> Result<KvLayout, LayoutError> {
        KvLayout::checked(shape, Device::Host, buffers, None)
    }

    #[test]
    fn a_layout_knows_the_bytes_of_a_token() {
        assert_eq!(layout(SHAPE, buffers(4)).unwrap().token_bytes(), 4 * 64);
    }

    #[test]
    fn each_difference_that_matters_changes_the_fingerprint() {
        // XFER-6, F21.
        let own = layout(SHAPE, buffers(4)).unwrap().fingerprint();
        let wide = |mut b: Vec<Buffer>, row| {
            b.iter_mut().for_each(|b| b.row = row);
            b
        };
        let others = [
            layout(
                Shape {
                    dtype: Dtype::Float16,
                    ..SHAPE
                },
                buffers(4),
            ),
            layout(Shape { layers: 3, ..SHAPE }, buffers(6)),
            layout(Shape { heads: 8, ..SHAPE }, wide(buffers(4), 128)),
            layout(
                Shape {
                    heads: 8,
                    head_dim: 4,
                    ..SHAPE
                },
                buffers(4),
            ),
            layout(Shape { tp: (0, 2), ..SHAPE }, buffers(4)),
            layout(Shape { tp: (1, 2), ..SHAPE }, buffers(4)),
        ];
        let mut seen = vec![own];
        for other in others {
            let print = other.unwrap().fingerprint();
            assert!(!seen.contains(&print), "{print}");
            seen.push(print);
        }
    }

    #[test]
    fn pool_size_addresses_and_page_size_do_not() {
        let mut moved = buffers(4);
        moved.iter_mut().for_each(|b| {
            b.base += 64;
            b.slots = 7;
        });
        let other = layout(
            Shape {
                page_tokens: 1,
                ..SHAPE
            },
            moved,
        )
        .unwrap();
        assert_eq!(other.fingerprint(), layout(SHAPE, buffers(4)).unwrap().fingerprint());
    }

    fn files(n: usize) -> Vec<Backing> {
        let file: Arc<OwnedFd> = Arc::new(std::fs::File::open("/proc/self/exe").unwrap().into());
        (0..n as u64)
            .map(|i| Backing {
                file: file.clone(),
                offset: i << 12,
            })
            .collect()
    }

    #[test]
    fn files_behind_the_buffers_do_not_either() {
        // XFER-6: a worker whose pool peers can map matches one whose pool they cannot.
        let plain = layout(SHAPE, buffers(4)).unwrap();
        assert!(plain.backing(0).is_none());
        let shared = plain.clone().with_backing(files(4)).unwrap();
        assert_eq!(shared.fingerprint(), plain.fingerprint());
        assert_eq!(shared.backing(3).map(|b| b.offset), Some(3 << 12));
        assert!(shared.backing(4).is_none());
    }

    #[test]
    fn files_are_one_per_buffer_and_of_host_memory() {
        let refused = layout(SHAPE, buffers(4)).unwrap().with_backing(files(3)).unwrap_err();
        assert_eq!(refused.to_string(), "4 buffers need as many backing files, got 3");
        let gpu = KvLayout::checked(SHAPE, Device::Cuda(1), buffers(4), None).unwrap();
        let refused = gpu.with_backing(files(4)).unwrap_err();
        assert_eq!(refused.to_string(), "buffers on Cuda(1) have no backing files");
    }

    #[test]
    fn a_buffer_outside_the_shared_memory_is_named() {
        let memory = SharedMemory::new(4 * 6400).unwrap();
        let mut inside = buffers(4);
        for (buffer, i) in inside.iter_mut().zip(0..) {
            buffer.base = memory.address() as u64 + i * 6400;
        }
        let mut outside = inside.clone();
        let shared = layout(SHAPE, inside).unwrap().within(&memory).unwrap();
        assert_eq!(shared.backing(3).map(|b| b.offset), Some(3 * 6400));
        outside[2].base += 2 * 6400;
        let refused = layout(SHAPE, outside).unwrap().within(&memory).unwrap_err();
        assert_eq!(refused.to_string(), "buffer 2 lies outside the shared memory");
    }

    #[test]
    fn what_does_not_fit_is_named() {
        assert_eq!(
            layout(SHAPE, buffers(3)).unwrap_err().to_string(),
            "2 layers need 4 buffers (all K, then all V), got 3"
        );
        let mut narrow = buffers(4);
        narrow[2].row = 32;
        assert_eq!(
            layout(SHAPE, narrow).unwrap_err().to_string(),
            "buffer 2: row is 32, expected 64"
        );
        let mut short = buffers(4);
        short[3].slots = 99;
        assert_eq!(
            layout(SHAPE, short).unwrap_err().to_string(),
            "buffer 3: slots is 99, expected 100"
        );
        assert!(layout(Shape { heads: 0, ..SHAPE }, buffers(4)).is_err());
        assert!(layout(Shape { tp: (2, 2), ..SHAPE }, buffers(4)).is_err());
        assert!(
            layout(
                Shape {
                    heads: 1 << 20,
                    head_dim: 1 << 20,
                    ..SHAPE
                },
                buffers(4)
            )
            .is_err()
        );
    }

    #[test]
    fn dtype_names_are_read_back() {
        for d in ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"] {
            assert_eq!(Dtype::parse(d).map(Dtype::as_str), Some(d));
        }
        assert_eq!(Dtype::parse("int4"), None);
    }
}
