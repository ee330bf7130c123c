#!/usr/bin/env bash
# third_party/install.sh FOLDER PYTHON: makes FOLDER/.venv of PYTHON with FOLDER/requirements.txt, unless it stands.
set -euo pipefail
cd "$(dirname "$0")/$1"
if ! command -v "$2" >/dev/null; then
	echo "$1 needs $2, which is not on PATH; install it (for example: apt install python3.11 python3.11-venv)" \
		"or set BENCH_PYTHON311=/path/to/python3.11" >&2
	exit 1
fi
if cmp --silent requirements.txt .venv/.installed; then exit 0; fi
rm -rf .venv
"$2" -m venv .venv
# llama.cpp is compiled from source, for this machine's own instructions.
CMAKE_ARGS="${CMAKE_ARGS:--DGGML_NATIVE=ON}" .venv/bin/python -m pip install --quiet --disable-pip-version-check \
	--requirement requirements.txt
cp requirements.txt .venv/.installed
