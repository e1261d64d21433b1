# A kernel without RDMA: its modules are taken out. Nothing but no-library can come after it.
for module in rdma_rxe rdma_ucm ib_uverbs rdma_cm iw_cm ib_cm ib_core; do [ ! -e /sys/module/$module ] || rmmod $module; done
