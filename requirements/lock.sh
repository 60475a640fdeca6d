#!/bin/sh
# Re-makes lock.txt from lock.in: one file for Python 3.9 to 3.11, each package with its hashes.
# Versions in the present lock.txt stay unless lock.in forbids them; `lock.sh --upgrade` renews all.
set -eu
cd "$(dirname "$0")"
uv=uv
if ! uv --version >/dev/null 2>&1; then
    tmp=$(mktemp -d)
    trap 'rm -rf "$tmp"' EXIT
    python3 -m venv "$tmp"
    "$tmp/bin/pip" install --quiet uv
    uv=$tmp/bin/uv
fi
# The custom command stands in the head of lock.txt in place of this machine's paths.
UV_CUSTOM_COMPILE_COMMAND="make lock" "$uv" pip compile lock.in --overrides overrides.txt \
    --universal --python-version 3.9 --generate-hashes --quiet --output-file lock.txt "$@"
