#!/usr/bin/env bash
# A Docker engine of one's own, for a Debian or Ubuntu machine that has none and cannot ask a registry for images
# (CI, a sandbox): tests/deploy/test_docker_engine.py then runs the real compose file on it. With Docker installed, nobody
# needs this.
#
#   docker/engine.sh up DIR       as root: dockerd, compose and stand-ins of the base images, all in DIR; minutes
#   . DIR/env                     what docker needs to find it
#   docker/engine.sh build [SERVICE]...   the images: rollout, learner and tools, or those named
#   pytest -m slow tests/deploy/test_docker_engine.py
#   docker/engine.sh down DIR     stops it; DIR is kept, so that the next `up` takes seconds
#
# All of it: make test-engine.
#
# A stand-in has the official image's name and what this project uses of it, from Debian's packages: Python 3.11,
# Redis, Prometheus. Grafana is in no package: its stand-in only sleeps, and says so in its label.
set -euo pipefail
usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }
fail() { echo "engine.sh: $*" >&2; exit 1; }
here=$(cd "$(dirname "$0")" && pwd)

install_tools() {
    local missing=()
    for pair in dockerd:docker.io docker:docker.io iptables:iptables debootstrap:debootstrap; do
        command -v "${pair%:*}" > /dev/null || missing+=("${pair#*:}")
    done
    if [ ${#missing[@]} -gt 0 ]; then
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends "${missing[@]}"
    fi
}

# Debian 12 has no compose v2. Debian 13's runs on it; apt is asked for it without a trace in its own settings.
install_compose() {
    docker compose version > /dev/null 2>&1 && return
    mkdir -p "$dir"/apt/{lists,cache/archives}/partial "$DOCKER_CONFIG/cli-plugins"
    local keys=/usr/share/keyrings/debian-archive-keyring.gpg
    echo "deb [signed-by=$keys] http://deb.debian.org/debian trixie main" > "$dir/apt/sources.list"
    local apt=(apt-get -qq -o "Dir::Etc::sourcelist=$dir/apt/sources.list" -o Dir::Etc::sourceparts=-
        -o "Dir::State::lists=$dir/apt/lists" -o "Dir::Cache=$dir/apt/cache" -o APT::Sandbox::User=root)
    "${apt[@]}" update
    (cd "$dir/apt" && "${apt[@]}" download docker-compose/trixie && dpkg -x docker-compose_*.deb unpacked)
    cp "$dir/apt/unpacked/usr/libexec/docker/cli-plugins/docker-compose" "$DOCKER_CONFIG/cli-plugins/"
}

# No bridge, no firewall, no forwarding: containers reach each other over the networks of their project,
# a build has the host's network, and nothing of this machine is changed.
start() {
    docker version > /dev/null 2>&1 && return
    mkdir -p "$dir/data" "$dir/exec"
    setsid dockerd --data-root="$dir/data" --exec-root="$dir/exec" --pidfile="$dir/dockerd.pid" -H "$DOCKER_HOST" \
        --storage-driver=overlay2 --iptables=false --ip6tables=false --ip-forward=false --bridge=none \
        >> "$dir/dockerd.log" 2>&1 < /dev/null &
    for _ in $(seq 100); do
        docker version > /dev/null 2>&1 && return
        sleep 0.3
    done
    fail "dockerd did not start: $(tail -n 3 "$dir/dockerd.log")"
}

make_root() {
    local root=$dir/root
    [ -e "$root/.made" ] && return
    rm -rf "$root"
    debootstrap --variant=minbase --include=ca-certificates bookworm "$root" http://deb.debian.org/debian > "$dir/debootstrap.log"
    printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
    chmod +x "$root/usr/sbin/policy-rc.d" # starts no service in there
    DEBIAN_FRONTEND=noninteractive chroot "$root" sh -c 'apt-get update -qq && apt-get install -y -qq \
        --no-install-recommends python3 python3-pip python-is-python3 redis-server prometheus && apt-get clean' > "$dir/apt.log" 2>&1
    rm -rf "$root"/usr/lib/python3*/EXTERNALLY-MANAGED "$root"/var/lib/apt/lists/*
    install -d -m 777 "$root/prometheus"
    install -d "$root/data"
    chown --reference="$root/var/lib/redis" "$root/data"
    as_pip_here "$root"
    touch "$root/.made"
}

# Builds have this machine's certificates and its pip's folder of wheels, if it has one.
as_pip_here() {
    cp "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$1/etc/ssl/certs/ca-certificates.crt"
    local wheels=${PIP_FIND_LINKS:-}
    printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\ndefault-timeout = 180\n' > "$1/etc/pip.conf"
    if [ -d "$wheels" ]; then
        cp -rL "$wheels" "$1/wheels"
        echo 'find-links = /wheels' >> "$1/etc/pip.conf"
    fi
}

stand_in() {
    local name=$1
    shift
    printf '%s\n' 'FROM debian:bookworm-slim' 'LABEL areal-q.stand-in=true' "$@" \
        | docker build -q -t "$name" - > /dev/null 2> "$dir/build.log"
}

import_bases() {
    docker image inspect debian:bookworm-slim > /dev/null 2>&1 || tar -C "$dir/root" --exclude='./proc/*' \
        --exclude='./sys/*' --exclude='./dev/*' -c . | docker import - debian:bookworm-slim > /dev/null
    stand_in python:3.11-slim
    stand_in redis:7-bookworm
    stand_in prom/prometheus:v2.55.1 'USER nobody' 'WORKDIR /prometheus' 'VOLUME /prometheus' \
        'ENTRYPOINT ["/usr/bin/prometheus"]'
    stand_in grafana/grafana:11.3.0 'USER nobody' 'ENTRYPOINT ["sleep", "infinity"]'
}

# By compose, which has its own BuildKit. A container of a build would have no network without a bridge.
build() {
    export TORCH=${TORCH:-torch==2.13.0+cpu}
    # With a folder of wheels no further index is asked, which costs seconds a package where it cannot be reached.
    [ ! -d "${PIP_FIND_LINKS:-}" ] || export PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL:-}
    [ $# -gt 0 ] || set -- rollout learner tools
    for service in "$@"; do
        echo "services: {$service: {build: {network: host}}}" \
            | docker compose -f "$here/compose.yaml" -f - --profile '*' build "$service"
    done
}

stop() {
    if [ -e "$dir/dockerd.pid" ]; then
        local pid
        pid=$(cat "$dir/dockerd.pid")
        kill -TERM "$pid" 2> /dev/null || true
        while kill -0 "$pid" 2> /dev/null; do sleep 0.2; done
    fi
    # Innermost first; there are none when it stopped well but for the network's.
    awk -v d="$dir/" 'index($2, d) == 1 { print $2 }' /proc/mounts | sort -r | xargs -r -n1 umount
}

[ $# -ge 1 ] || usage
if [ "$1" = build ]; then
    build "${@:2}"
    exit
fi
[ $# -eq 2 ] || usage
mkdir -p "$2"
dir=$(cd "$2" && pwd)
export DOCKER_HOST=unix://$dir/docker.sock DOCKER_CONFIG=$dir/config
case $1 in
    up)
        [ "$(id -u)" = 0 ] || fail "dockerd and debootstrap need root"
        install_tools
        start
        install_compose
        make_root
        import_bases
        printf 'export DOCKER_HOST=%q DOCKER_CONFIG=%q\n' "$DOCKER_HOST" "$DOCKER_CONFIG" > "$dir/env"
        echo "Ready. In this shell: . $dir/env"
        ;;
    down) stop ;;
    *) usage ;;
esac
