#!/usr/bin/env bash
# What some tests need of a Debian system: tests/kernel `ip` and `nft`, tests/api/test_page.py a Chromium. Installs what is
# missing, as root and where there is apt-get. Never fails: without them those tests are skipped, and say why.
set -u

missing=()
command -v ip >/dev/null || missing+=(iproute2)
command -v nft >/dev/null || missing+=(nftables)
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || missing+=(chromium)

if [ "${#missing[@]}" -gt 0 ] && [ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  printf 'installing %s for tests\n' "${missing[*]}" >&2
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -qq -y --no-install-recommends "${missing[@]}"; } >/dev/null ||
    printf 'that failed: the tests that need them will be skipped\n' >&2
fi
exit 0
