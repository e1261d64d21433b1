# A kernel without RDMA: its modules are taken out, to be the last but one of a boot.
rmmod rdma_rxe rdma_ucm ib_uverbs rdma_cm iw_cm ib_cm ib_core
