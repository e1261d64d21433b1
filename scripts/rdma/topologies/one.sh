# One RoCE device, rxe0 on a dummy interface: both ends of every pair are on it.
$IP link add d0 type dummy
$IP link set d0 mtu 9000
$IP addr add 10.77.0.1/24 dev d0
$IP link set d0 up
rdma link add rxe0 type rxe netdev d0
