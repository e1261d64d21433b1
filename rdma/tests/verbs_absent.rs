//! A machine without RDMA: no library, no kernel module, no device. The binary starts, says what is missing in one line
//! and goes on without. scripts/rdma/test.sh runs it in guests that lack each; on any machine it must not panic.

use std::env;

use kvc_rdma::{
    MoverError, VerbsConfig, VerbsMover,
    verbs::{VerbsError, survey},
};

#[test]
fn what_is_missing_is_told_in_one_line() {
    let (found, started) = (survey(), VerbsMover::start(VerbsConfig::default()).map(|_| ()));
    eprintln!("found {found:?}, started {started:?}");
    let Ok(expected) = env::var("KVC_RDMA_EXPECT") else {
        assert!(matches!(started, Ok(()) | Err(MoverError::Verbs(_))), "{started:?}");
        return;
    };
    let Err(MoverError::Verbs(error)) = started else {
        panic!("{started:?}")
    };
    let (told, remedy) = match &error {
        VerbsError::NoLibrary => ("library", "install rdma-core"),
        VerbsError::NoKernel { .. } => ("kernel", "load ib_uverbs"),
        VerbsError::NoDevice => ("device", "rdma link"),
        other => panic!("{other}"),
    };
    assert_eq!(told, expected);
    let line = error.to_string();
    assert!(line.contains(remedy) && !line.contains('\n'), "{line}");
    if let Err(verbs) = found.verbs {
        assert_eq!(verbs, error);
    }
}
