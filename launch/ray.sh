#!/usr/bin/env bash
# A Ray cluster of this machine, and engines on it: launch/ray.sh PYTHON [flags of the launcher]
# `make serve-ray` runs it. The cluster ends with the launcher. Ray listens on all of the machine's
# addresses, and runs the code of everyone who reaches it; so it asks for a token here.
set -euo pipefail
python=$1
shift
port=${RAY_PORT:-6379}
mkdir -p -m 700 .run
log=.run/ray.log
for secret in .run/engine.secret .run/ray.token; do
    [ -s $secret ] || (umask 077 && "$python" -c 'import secrets; print(secrets.token_hex(32))' >$secret)
done
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$PWD/.run/ray.token

# In a session of its own: Ctrl-C reaches the launcher, which still needs Ray then.
: >$log
setsid "$(dirname "$python")/ray" start --head --block --disable-usage-stats \
    --include-dashboard=false --port="$port" ${RAY_CPUS:+--num-cpus="$RAY_CPUS"} >$log 2>&1 &
ray=$!
trap 'kill $ray 2>/dev/null; wait $ray || true' EXIT
trap : INT TERM
echo "starting Ray; its log: $log"
until grep -q "Ray runtime started" $log; do
    kill -0 $ray 2>/dev/null || { cat $log; exit 1; }
    sleep 0.2
done
echo "for python -m sgl_ext.fleet: export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH"
"$python" -m sgl_ext.launch --ray-address "127.0.0.1:$port" --engine-secret file:.run/engine.secret "$@" &
launcher=$!
trap 'kill $launcher 2>/dev/null' TERM # Ctrl-C reaches it by itself
while kill -0 $launcher 2>/dev/null; do
    status=0
    wait $launcher || status=$?
done
exit "${status:-0}"
