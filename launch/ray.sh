#!/usr/bin/env bash
# A Ray cluster of one node, and a fleet of engines on it: launch/ray.sh PYTHON [the launcher's flags]
# `make serve-ray` runs it. The cluster is for this machine alone, and ends with the launcher.
set -euo pipefail
python=$1
shift
port=${RAY_PORT:-6379}
mkdir -p -m 700 .run
log=.run/ray.log
: >$log
secret=.run/engine.secret
[ -s $secret ] || (umask 077 && "$python" -c 'import secrets; print(secrets.token_urlsafe(32))' >$secret)

# A session of its own, so that Ctrl-C reaches the launcher and not the nodes that it still drains.
RAY_USAGE_STATS_ENABLED=0 setsid "$(dirname "$python")/ray" start --head --block --disable-usage-stats \
    --include-dashboard=false --node-ip-address=127.0.0.1 --port="$port" \
    ${RAY_CPUS:+--num-cpus="$RAY_CPUS"} >$log 2>&1 &
ray=$!
trap 'kill $ray 2>/dev/null; wait $ray 2>/dev/null || true' EXIT
trap : INT TERM
echo "starting Ray; its log: $log"
until grep -q "Ray runtime started" $log; do
    kill -0 $ray 2>/dev/null || { cat $log; exit 1; }
    sleep 0.2
done
"$python" -m sgl_ext.launch --ray-address "127.0.0.1:$port" --engine-secret file:$secret "$@" &
launcher=$!
trap 'kill -TERM $launcher 2>/dev/null' TERM  # Ctrl-C reaches it by itself
while kill -0 $launcher 2>/dev/null; do wait $launcher && status=$? || status=$?; done
exit "${status:-0}"
