#!/usr/bin/env bash
# Run the steps of docker/Dockerfile.cpu, and then the demo as the image's user, where there is no
# docker daemon: in a bare Debian root, which is removed afterwards. It needs root, debootstrap and
# 20 GB in $TMPDIR.
#   sudo docker/try.sh
set -euo pipefail
cd "$(dirname "$0")/.."
recipe=docker/Dockerfile.cpu

die() { echo "try.sh: error: $*" >&2; exit 1; }

# One instruction a line, without comments.
steps() { sed -e '/^ *#/d' "$recipe" | sed -e ':a' -e '/\\$/{N; s/ *\\\n */ /; ta' -e '}'; }

# This machine's settings for pip, proxies and certificates; nothing else of its environment.
settings() { env | grep -iE '^(pip_[a-z_]*|[a-z]*_proxy|ssl_cert_[a-z]*|requests_ca_bundle)=' || true; }

user=root
inside() { # WORKDIR COMMAND..., as $user
    local environment home=/root
    [ "$user" = root ] || home=/home/$user
    mapfile -t environment < <(settings)
    chroot --userspec="$user" "$root" env -i "${environment[@]}" HOME="$home" LANG=C.UTF-8 \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -c 'mkdir -p "$0"; cd "$0"; exec "$@"' "$@"
}

share() { # a host's file or folder at the same place in the root
    [ -e "$1" ] || return 0
    mkdir -p "$root/$(dirname "$1")"
    if [ -d "$1" ]; then mkdir -p "$root/$1"; else touch "$root/$1"; fi
    mount --rbind "$1" "$root/$1"
}

# Stands in for python:X.Y-slim: the Debian that has this Python, with pip at liberty in /usr/local.
from() {
    local version suite mirror
    version=$(sed -nE 's/^python:([0-9.]+)-slim$/\1/p' <<<"$1")
    case $version in 3.11) suite=bookworm ;; 3.13) suite=trixie ;; *) die "no stand-in for FROM $1" ;; esac
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' \
        "Codename: $suite" | head -n 1)
    debootstrap --variant=minbase --include=ca-certificates,python3-dev,python3-venv \
        "$suite" "$root" ${mirror:+"$mirror"}
    mount -t proc proc "$root/proc"
    for place in /sys /dev /etc/resolv.conf /etc/hosts /etc/ssl/certs /etc/pip.conf \
        /root/.config/pip; do share "$place"; done
    inside / python3 -m venv /usr/local
}

copy() { # WORKDIR SOURCE... TARGET
    local target=$root/$1/${*: -1} source
    for source in "${@:2:$#-2}"; do
        [ -e "$source" ] || die "COPY: there is no $source"
        [ -d "$source" ] || [[ $target = */ ]] || die "COPY: a file's target must end with /"
        mkdir -p "$target"
        cp -r "$source$([ -d "$source" ] && echo /.)" "$target"
    done
}

build_and_run() {
    local workdir=/ command=() instruction rest
    while read -r instruction rest; do
        echo "== $instruction $rest"
        case $instruction in
            FROM) from "$rest" ;;
            WORKDIR) workdir=$rest ;;
            COPY) read -ra command <<<"$rest"; copy "$workdir" "${command[@]}" ;;
            RUN) inside "$workdir" sh -c "$rest" </dev/null ;;
            USER) user=$rest ;;
            LABEL | EXPOSE | HEALTHCHECK) ;;
            CMD) # its server would never end
                copy / examples/demo.py ./
                inside "$workdir" python /demo.py </dev/null
                ;;
            *) die "unknown instruction $instruction" ;;
        esac
        echo "   after ${SECONDS} s"
    done < <(steps)
}

if [ "${1:-}" = --in-namespace ]; then # where mounts and processes end with this script
    root=$2
    build_and_run
    exit
fi
[ "$(id -u)" = 0 ] || die "making a root needs root: sudo $0"
command -v debootstrap >/dev/null || die "debootstrap is missing: apt-get install debootstrap"
root=$(mktemp -d "${TMPDIR:-/tmp}/image.XXXXXX")
trap 'rm -rf --one-file-system "$root"' EXIT
[ "$(df --output=avail -k "$root" | tail -n 1)" -gt $((20 << 20)) ] || die "$root has less than 20 GB free"
unshare --mount --pid --fork --kill-child "$0" --in-namespace "$root"
