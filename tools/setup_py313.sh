#!/usr/bin/env bash
# Unpack Debian 13, which has Python 3.13, into a folder, and run a command there on a copy of this checkout.
#
#     tools/setup_py313.sh /var/tmp/py313                # unpack, copy the checkout
#     tools/setup_py313.sh /var/tmp/py313 make test      # the same, then run `make test` there
#
# Needs root and debootstrap (apt-get install debootstrap). A second call keeps what is unpacked and installed, and
# copies the checkout again. Mounts are made in a namespace of their own and end with the command.
# SHOW="/srv/index /srv/wheels": folders of the host that the command can read, such as a local package index.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ $# -ge 1 ] || { echo "usage: tools/setup_py313.sh DIR [COMMAND...]" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "run this as root: debootstrap and chroot need it" >&2; exit 2; }
command -v debootstrap >/dev/null || { echo "install debootstrap: apt-get install debootstrap" >&2; exit 2; }
mkdir -p "$1"
root=$(cd "$1" && pwd)
shift
[ "$root" != / ] || { echo "DIR must be a folder of its own, not /" >&2; exit 2; }

if [ ! -e "$root/.unpacked" ]; then
    packages=python3,python3-venv,make,git,ca-certificates,procps,iproute2
    "$here/tools/installing.sh" "Debian 13 into $root" "$root.log" \
        debootstrap --variant=minbase --include="$packages" trixie "$root"
    touch "$root/.unpacked"
fi

# The host's settings of the network and of pip.
for file in /etc/resolv.conf /etc/hosts /etc/pip.conf "$HOME/.config/pip/pip.conf" /etc/ssl/certs/ca-certificates.crt; do
    [ -e "$file" ] || continue
    target=$root${file/#"$HOME"\//\/root\/}
    mkdir -p "$(dirname "$target")"
    cp -L "$file" "$target"
done

# Files that were deleted from the checkout are deleted from the copy, too; its virtual environments stay.
copy=$root/root/arealite
mkdir -p "$copy"
find "$copy" -mindepth 1 -maxdepth 1 ! -name '.venv*' -exec rm -rf {} +
(cd "$here" && git ls-files -z --cached --others --exclude-standard) |
    tar -c -C "$here" --null --ignore-failed-read -T - | tar -x -C "$copy"
[ $# -gt 0 ] || { echo "unpacked: $root; the checkout is in $copy"; exit; }

exec unshare --mount --propagation private bash -c '
    root=$1 show=$2
    shift 2
    mount --rbind /proc "$root/proc" && mount --rbind /sys "$root/sys" && mount --rbind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/run"
    for folder in $show; do
        mkdir -p "$root$folder" && mount --rbind "$folder" "$root$folder"
    done
    exec env HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        chroot "$root" bash -c "cd /root/arealite && exec \"\$@\"" - "$@"
' - "$root" "${SHOW:-}" "$@"
