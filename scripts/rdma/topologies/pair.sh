# Two RoCE devices, rxe0 (10.77.0.1) and rxe1 (10.77.0.2), whose frames cross a veth pair. Both ends stay in the first
# network namespace, the only one the driver listens in, so the two policy rules keep the kernel from taking the short
# way over lo; addresses are resolved by hand, since lo would answer.
echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
$IP link add v0 type veth peer name v1
for end in v0 v1; do
  $IP link set $end mtu 4500 up
  echo 1 > /proc/sys/net/ipv4/conf/$end/accept_local
  echo 0 > /proc/sys/net/ipv4/conf/$end/rp_filter
done
$IP addr add 10.77.0.1/32 dev v0
$IP addr add 10.77.0.2/32 dev v1
$IP route add 10.77.0.2 dev v0 src 10.77.0.1 table 100
$IP route add 10.77.0.1 dev v1 src 10.77.0.2 table 101
$IP rule add pref 10 iif lo from 10.77.0.1 to 10.77.0.2 lookup 100
$IP rule add pref 11 iif lo from 10.77.0.2 to 10.77.0.1 lookup 101
$IP rule add pref 200 lookup local   # behind the two rules above
$IP rule del pref 0
$IP neigh add 10.77.0.2 lladdr $(cat /sys/class/net/v1/address) dev v0 nud permanent
$IP neigh add 10.77.0.1 lladdr $(cat /sys/class/net/v0/address) dev v1 nud permanent
rdma link add rxe0 type rxe netdev v0
rdma link add rxe1 type rxe netdev v1
