#!/bin/bash
# prometheus3.sh DIR: Prometheus 3.x and promtool of Debian's unstable suite, unpacked into DIR/bin, in about 20 seconds.
#
# Stable Debian still ships 2.x, and rules must mean the same in both. The packages come over the mirror that this
# machine already uses and are checked against its Debian keyring. apt works on state of its own in a temporary
# folder: nothing is installed, and the machine's package lists stay as they are.
set -euo pipefail

folder=${1:?usage: prometheus3.sh DIR}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

cannot() {
  echo "no Prometheus 3.x: $1" >&2
  exit 1
}

show_version() {
  # Some builds print it on stdout, some on stderr.
  "$folder/bin/prometheus" --version 2>&1 | head -n 1
}

if [ -x "$folder/bin/prometheus" ] && [ -x "$folder/bin/promtool" ]; then
  show_version
  exit 0
fi

command -v apt-get >/dev/null || cannot "this is not a Debian-like system (no apt-get)"
[ -r "$keyring" ] || cannot "$keyring is missing (package debian-archive-keyring)"
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
  grep -E '/debian/?$' | sort -u | head -n 1) || true
[ -n "$mirror" ] || cannot "no Debian mirror among this machine's apt sources"

mkdir -p "$folder/bin"
work=$(mktemp -d "$folder/unpacking.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/packages" "$work/root"
echo "deb [signed-by=$keyring] $mirror sid main" >"$work/sources.list"

# Options on the command line, because they win over everything in the machine's apt configuration.
private_apt() {
  apt-get -qq \
    -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
    -o Dir::State::lists="$work/lists" -o Dir::Cache="$work" -o Dir::Cache::archives="$work/archives" \
    -o Acquire::Languages=none -o Acquire::Retries=2 -o APT::Update::Error-Mode=any \
    -o APT::Sandbox::User="$(id -un)" "$@" >>"$work/apt.log" 2>&1
}

apt_error() {
  grep -m 1 '^E:' "$work/apt.log" || echo "apt-get gave no reason"
}

private_apt update || cannot "apt-get update of the unstable suite failed: $(apt_error)"
# promtool has a package of its own there; before that it was a part of the other.
(
  cd "$work/packages"
  private_apt download prometheus promtool || private_apt download prometheus
) || cannot "its package could not be downloaded: $(apt_error)"
for package in "$work/packages/"*.deb; do
  dpkg-deb --extract "$package" "$work/root"
done

for program in prometheus promtool; do
  [ -x "$work/root/usr/bin/$program" ] || cannot "Debian's packages have no $program"
  "$work/root/usr/bin/$program" --version >"$work/version" 2>&1 ||
    cannot "this machine cannot run the unstable suite's $program: $(tail -n 1 "$work/version")"
done
grep -q 'version 3\.' "$work/version" || cannot "the unstable suite has $(head -n 1 "$work/version")"
# prometheus last, for it is what a later call looks at first.
mv "$work/root/usr/bin/promtool" "$folder/bin/promtool"
mv "$work/root/usr/bin/prometheus" "$folder/bin/prometheus"
show_version
