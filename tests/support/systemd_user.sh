# Runs "$@" beside a systemd of its own, in mount namespace of its own: unshare -m sh systemd_user.sh
# UNIT COMMAND... The manager finds UNIT; $XDG_RUNTIME_DIR is its directory below /run. Needs root.
set -eu
unit=$1
shift
mount --make-rprivate /
# What the system's own manager would have made.
mkdir -p /run/systemd /run/kvt-user
mount -t tmpfs -o mode=755 none /run/systemd
mount -t tmpfs -o mode=755 none /run/kvt-user
mkdir -p /run/systemd/system /run/systemd/inaccessible/dir
cd /run/systemd/inaccessible
touch reg
mkfifo fifo
mknod chr c 0 0
mknod blk b 0 0
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("sock")'
chmod 000 ./*
cd /
export XDG_RUNTIME_DIR=/run/kvt-user HOME=/run/kvt-user
mkdir -p /run/kvt-user/systemd/user
cp "$unit" /run/kvt-user/systemd/user/
/lib/systemd/systemd --user </dev/null >/dev/null 2>&1 &
manager=$!
trap 'systemctl --user stop "$(basename "$unit")" || true; kill $manager; wait $manager || true' EXIT
for _ in $(seq 100); do
    test -S /run/kvt-user/systemd/private && break
    sleep 0.05
done
"$@"
