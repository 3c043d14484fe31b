#!/usr/bin/env bash
# Start environment servers on consecutive ports of this machine, and stop all of them on Ctrl-C.
#
#   launchers/servers.sh --env NAME [--num_servers 1] [--base_port 8000] [key=value ...]
#
# --env        the environment of every server: `arealite envs` lists the names
# key=value    options of `arealite serve`, for every server, for example server.token_env=TOKEN
#
# The first line has the options with which a run uses the servers. Each server prints its address
# when it is ready. If one exits, the others are stopped, and its exit code is returned.
# Environment: PYTHON (python3).
root=$(cd "$(dirname "$0")/.." && pwd)
env='' servers=1 port=8000 words=()
refuse() {
    echo "servers.sh: $1" >&2
    sed -n '3,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
    --env | --num_servers | --base_port)
        [ $# -ge 2 ] || refuse "$1 has no value"
        case $1 in --env) env=$2 ;; --num_servers) servers=$2 ;; *) port=$2 ;; esac
        shift 2
        ;;
    *=*) words+=("$1") && shift ;;
    *) refuse "$1 is no option" ;;
    esac
done
[ -n "$env" ] || refuse "--env is missing: the name of an environment"
for number in "--num_servers $servers" "--base_port $port"; do
    [[ $number =~ ^[^\ ]*\ [1-9][0-9]*$ ]] || refuse "$number must be a whole number above 0"
done
((port + servers <= 65536)) || refuse "--base_port $port: there is no port above 65535"

trap : PIPE # a closed output does not end this script; the servers do not inherit this
places=()
for ((i = 0; i < servers; i++)); do places+=("127.0.0.1:$((port + i))"); done
collector=trainer.ppo.collector.env
echo "a run uses them with: $collector.type=$env $collector.runtime.type=remote" \
    "$collector.runtime.addresses=[$(IFS=,; echo "${places[*]}")]"

children=()
stop() {
    trap '' INT TERM HUP
    [ ${#children[@]} -eq 0 ] || kill -TERM "${children[@]}" 2>/dev/null
    wait
    exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
for ((i = 0; i < servers; i++)); do
    "${PYTHON:-python3}" -m arealite.cli.main serve \
        "env.type=$env" "server.port=$((port + i))" ${words[@]+"${words[@]}"} &
    children+=($!)
done
wait -n
code=$?
echo "servers.sh: a server exited with code $code; the others are stopped" >&2
stop "$code"
