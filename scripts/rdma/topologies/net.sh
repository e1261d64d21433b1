# One of two guests on one wire (two-guests.sh): guest N has 10.88.0.N on eth0 and rxe0 above it.
for _ in 1 2 3 4 5 6 7 8 9 10; do [ ! -e /sys/class/net/eth0 ] || break; sleep 0.2; done
$IP addr add 10.88.0.$GUEST/24 dev eth0
$IP link set eth0 mtu 4500
$IP link set eth0 up
rdma link add rxe0 type rxe netdev eth0
