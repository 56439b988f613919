#!/bin/sh
# Run as root by the service `secrets` of compose.yaml. SECRETS names each secret and the services that get it:
# "redis_password=redis,learner grafana_password=grafana". A secret is, in this order, the file that a variable
# names (/named), a file of docker/secrets (/own), or 64 random digits, made once (/made) unless MADE_ELSEWHERE says
# where it comes from. Its value is never shown. LIMITS is the memory that the services may have, each as "16g".
set -eu
umask 077
fail() { echo "secrets: $*" >&2; exit 1; }

# The value as it is used: without the white space around it, and of one line.
value() {
    [ "$(wc -l < "$1")" -le 1 ] || fail "$2: the file has several lines; a password is one line"
    tr -d '\n' < "$1" | sed -e 's/^[[:space:]]*//' -e 's/[[:space:]]*$//' > /made/.line
    [ -s /made/.line ] || fail "$2: the file is empty; write a password into it, or remove it to have one made"
}

owner() {
    case $1 in
        redis) id -u redis ;;
        grafana) echo 472 ;;
        *) echo 10001 ;;
    esac
}

for service in /secrets/*/; do rm -f "$service"*; done
for entry in $SECRETS; do
    name=${entry%%=*}
    if [ -f "/named/$name" ]; then
        value "/named/$name" "$name"
    elif [ -e "/own/$name" ]; then
        value "/own/$name" "docker/secrets/$name"
    elif [ -n "${MADE_ELSEWHERE:-}" ]; then
        fail "docker/secrets/$name: no such file; copy it from $MADE_ELSEWHERE"
    else
        [ -s "/made/$name" ] || head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "/made/$name"
        cp "/made/$name" /made/.line
    fi
    for service in $(echo "${entry#*=}" | tr , ' '); do
        cp /made/.line "/secrets/$service/$name"
        chmod 400 "/secrets/$service/$name"
        chown "$(owner "$service")" "/secrets/$service" "/secrets/$service/$name"
    done
    rm /made/.line
done
# What the foreground of `docker compose up` says of the dashboard.
case $SECRETS in
    *grafana_password*)
        echo "Grafana: \`docker compose port grafana 3000\` says where; user admin, password:" \
            "\`docker compose exec grafana cat /secrets/grafana_password\`"
        ;;
esac
limits=0
for limit in ${LIMITS:-}; do
    limits=$((limits + $(echo "$limit" | tr a-z A-Z | tr -d B | numfmt --from=iec)))
done
machine=$(($(sed -n 's/^MemTotal: *\([0-9]*\).*/\1/p' /proc/meminfo) * 1024))
if [ "$limits" -gt "$machine" ]; then
    echo "memory: with one worker the services may have $(numfmt --to=iec "$limits"), this machine has" \
        "$(numfmt --to=iec "$machine"): it may run out before any of them is at its limit, and then the kernel ends" \
        "one. LEARNER_MEMORY, ROLLOUT_MEMORY and REDIS_MEMORY are in docker/.env"
fi
