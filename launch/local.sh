#!/usr/bin/env bash
# One process on this machine, with every device that JAX finds: launch/local.sh configs/quickstart.yaml [a.b=c ...]
set -euo pipefail
exec jaxsp train "$@"
