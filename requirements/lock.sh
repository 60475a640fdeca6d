#!/bin/sh
# Re-makes the locks, each package with its hashes: today.txt from today.in and docs.txt from docs.in, for
# Python 3.10 to 3.13, and tff.txt from tff.in, for Python 3.9 to 3.11.
# Versions in the present locks stay unless the .in file forbids them; `lock.sh --upgrade` renews all.
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

# compile NAME OLDEST_PYTHON OPTION...: one file for all later Pythons too, with markers where a
# package has left an older one behind.
compile() {
    name=$1 oldest=$2
    shift 2
    # The custom command stands in the head of the lock in place of this machine's paths.
    UV_CUSTOM_COMPILE_COMMAND="make lock" "$uv" pip compile "$name.in" --universal \
        --python-version "$oldest" --generate-hashes --quiet --output-file "$name.txt" "$@"
}

compile today 3.10 "$@"
compile docs 3.10 "$@"
compile tff 3.9 --overrides tff-overrides.txt "$@"
