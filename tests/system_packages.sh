#!/bin/bash
# system_packages.sh [--lab]: the Debian packages that the tests need; with --lab also what the lab needs to take
# pictures of dashboards. Quick and silent when everything is there already.
set -euo pipefail

# command -> package that has it
declare -A wanted=([prometheus]=prometheus [promtool]=prometheus [prometheus-alertmanager]=prometheus-alertmanager
  [openssl]=openssl [gcc]="gcc libc6-dev" [chromium-headless-shell]=chromium-headless-shell)
for argument in "$@"; do
  case $argument in
    --lab) wanted[chromium]=chromium ;;
    *)
      echo "usage: system_packages.sh [--lab]" >&2
      exit 2
      ;;
  esac
done

missing_packages() {
  for program in "${!wanted[@]}"; do
    command -v "$program" >/dev/null || printf '%s\n' ${wanted[$program]}
  done | sort -u
}

cannot() {
  echo "missing: ${packages[*]} ($1); install with: apt-get install --no-install-recommends ${packages[*]}" >&2
  exit 1
}

mapfile -t packages < <(missing_packages)
[ ${#packages[@]} -gt 0 ] || exit 0
command -v apt-get >/dev/null || cannot "no apt-get here"
[ "$(id -u)" -eq 0 ] || cannot "not root"

# The tests start their own Prometheus and Alertmanager; the packages must not leave a service running. Debian's way to say so is a
# policy file. Where the machine has one of its own, that one stays in charge.
policy=/usr/sbin/policy-rc.d
log=$(mktemp)
own_policy=
clean_up() {
  rm -f "$log"
  if [ -n "$own_policy" ]; then rm -f "$policy"; fi
}
trap clean_up EXIT
if [ ! -e "$policy" ]; then
  own_policy=yes
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi

echo "installing ${packages[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
install_packages() {
  apt-get install -qq --yes --no-install-recommends "${packages[@]}" >"$log" 2>&1 </dev/null
}
# The package lists may be absent or name versions that the mirror no longer has; only then are they fetched. A
# foreign source that does not answer must not matter, so it is the second install that decides.
install_packages || {
  apt-get update -qq >/dev/null 2>&1 </dev/null || true
  # Ubuntu has no browser in a package; what there is must not go without.
  mapfile -t packages < <(for package in "${packages[@]}"; do apt-cache show "$package" >/dev/null 2>&1 && echo "$package"; done)
  install_packages
} || cannot "$(grep -m 1 '^E:' "$log" || echo 'apt-get failed')"
mapfile -t packages < <(missing_packages)
[ ${#packages[@]} -eq 0 ] || cannot "still missing after the installation"
