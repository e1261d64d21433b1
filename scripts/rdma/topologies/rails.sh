# Two RoCE devices that know nothing of each other, rxe0 and rxe1, each on a dummy interface of its own: either can be
# taken away without the other noticing.
for n in 0 1; do
  $IP link add d$n type dummy
  $IP link set d$n mtu 9000
  $IP addr add 10.77.$n.1/24 dev d$n
  $IP link set d$n up
  rdma link add rxe$n type rxe netdev d$n
done
