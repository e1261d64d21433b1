//! libibverbs, loaded when it is first needed. [`super::device`] and the files beside it call through it.
//!
//! Types come from `ibverbs-sys`; the functions are resolved with `dlopen`, so that one binary starts on machines without
//! rdma-core (the crate's own link line leaves no trace, since none of its functions is named). Calls that verbs.h has
//! as inline functions go through the context's table, as there.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem,
    ptr::NonNull,
    sync::OnceLock,
};

pub(super) use ibverbs_sys as ffi;

use super::error::VerbsError;

const NAME: &CStr = c"libibverbs.so.1";

macro_rules! library {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The calls by their names in C.
        #[derive(Clone, Copy, Debug)]
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Since rdma-core 34.
            pub(super) ibv_reg_dmabuf_mr: Option<RegDmabuf>,
        }

        impl Library {
            fn resolve(handle: NonNull<c_void>) -> Result<Self, VerbsError> {
                Ok(Library {
                    $($name: {
                        let symbol = symbol(handle, concat!(stringify!($name), "\0"))
                            .ok_or(VerbsError::OldLibrary { symbol: stringify!($name) })?;
                        // SAFETY: obligation 1 holds trivially, nothing is registered yet — the symbol of this name
                        // has this type in every libibverbs.so.1, and the library is never unloaded.
                        unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(symbol.as_ptr()) }
                    },)*
                    ibv_reg_dmabuf_mr: symbol(handle, "ibv_reg_dmabuf_mr\0").map(|symbol| {
                        // SAFETY: obligation 1 — as above.
                        unsafe { mem::transmute::<*mut c_void, RegDmabuf>(symbol.as_ptr()) }
                    }),
                })
            }
        }
    };
}

type RegDmabuf = unsafe extern "C" fn(*mut ffi::ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ffi::ibv_mr;

library! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut ffi::ibv_device;
    ibv_free_device_list: fn(*mut *mut ffi::ibv_device);
    ibv_get_device_name: fn(*mut ffi::ibv_device) -> *const c_char;
    ibv_open_device: fn(*mut ffi::ibv_device) -> *mut ffi::ibv_context;
    ibv_close_device: fn(*mut ffi::ibv_context) -> c_int;
    ibv_query_device: fn(*mut ffi::ibv_context, *mut ffi::ibv_device_attr) -> c_int;
    ibv_query_port: fn(*mut ffi::ibv_context, u8, *mut ffi::ibv_port_attr) -> c_int;
    ibv_get_async_event: fn(*mut ffi::ibv_context, *mut ffi::ibv_async_event) -> c_int;
    ibv_ack_async_event: fn(*mut ffi::ibv_async_event);
    ibv_alloc_pd: fn(*mut ffi::ibv_context) -> *mut ffi::ibv_pd;
    ibv_dealloc_pd: fn(*mut ffi::ibv_pd) -> c_int;
    ibv_reg_mr: fn(*mut ffi::ibv_pd, *mut c_void, usize, c_int) -> *mut ffi::ibv_mr;
    ibv_dereg_mr: fn(*mut ffi::ibv_mr) -> c_int;
    ibv_create_comp_channel: fn(*mut ffi::ibv_context) -> *mut ffi::ibv_comp_channel;
    ibv_destroy_comp_channel: fn(*mut ffi::ibv_comp_channel) -> c_int;
    ibv_create_cq: fn(*mut ffi::ibv_context, c_int, *mut c_void, *mut ffi::ibv_comp_channel, c_int) -> *mut ffi::ibv_cq;
    ibv_destroy_cq: fn(*mut ffi::ibv_cq) -> c_int;
    ibv_get_cq_event: fn(*mut ffi::ibv_comp_channel, *mut *mut ffi::ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut ffi::ibv_cq, c_uint);
    ibv_create_qp: fn(*mut ffi::ibv_pd, *mut ffi::ibv_qp_init_attr) -> *mut ffi::ibv_qp;
    ibv_modify_qp: fn(*mut ffi::ibv_qp, *mut ffi::ibv_qp_attr, c_int) -> c_int;
    ibv_destroy_qp: fn(*mut ffi::ibv_qp) -> c_int;
}

impl Library {
    /// The library, loaded once per process.
    pub(super) fn load() -> Result<&'static Library, VerbsError> {
        static LIBRARY: OnceLock<Result<Library, VerbsError>> = OnceLock::new();
        let loaded = LIBRARY.get_or_init(|| {
            // SAFETY: obligation 1 — nothing is registered yet; the name is a C string, and what its constructors do is
            // what linking the library would do.
            let handle = unsafe { libc::dlopen(NAME.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            Library::resolve(NonNull::new(handle).ok_or(VerbsError::NoLibrary)?)
        });
        loaded.as_ref().map_err(Clone::clone)
    }
}

/// `name` ends with a zero byte.
fn symbol(handle: NonNull<c_void>, name: &'static str) -> Option<NonNull<c_void>> {
    // SAFETY: obligation 1 — nothing is registered yet; the handle is open for good and the name is a C string.
    NonNull::new(unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr().cast()) })
}
