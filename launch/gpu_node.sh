#!/usr/bin/env bash
# One process for all GPUs of this node: launch/gpu_node.sh configs/spice/qwen3_4b_base.yaml [a.b=c ...]
# Needs `pip install jaxsp[cuda12]` or `jaxsp[cuda13]`. Choose devices with CUDA_VISIBLE_DEVICES.
set -euo pipefail
command -v nvidia-smi >/dev/null || { echo "gpu_node.sh: no nvidia-smi here; use launch/local.sh" >&2; exit 1; }
# JAX would otherwise take three quarters of each GPU at once and leave the rest unused.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
exec jaxsp train "$@"
