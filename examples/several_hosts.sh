#!/bin/sh
# Trains on two hosts, with two ranks on each, over gloo. Run it on both, in a clone of this repository.
#
#     sh examples/several_hosts.sh 0 10.0.0.1 eth0        # on the first host; 10.0.0.1 is its address
#     sh examples/several_hosts.sh 1 10.0.0.1 eth0        # on the second host
#
# eth0: the network interface that reaches the other host (`ip route get 10.0.0.1` shows it after dev).
set -eu
export GLOO_SOCKET_IFNAME="$3"
exec .venv/bin/torchrun --nnodes 2 --node-rank "$1" --master-addr "$2" --master-port 29500 --nproc-per-node 2 examples/own_loop.py
