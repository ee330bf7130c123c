#!/usr/bin/env bash
# One process on this machine, with every device that JAX finds: launch/local.sh configs/quickstart.yaml [a.b=c ...]
set -euo pipefail
# Large memory pages for what glibc allocates: decoding on a CPU reads all weights for each token.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
exec jaxsp train "$@"
