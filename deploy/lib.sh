# shellcheck shell=bash
# deploy/lib.sh: what the scripts share: sentences, packages, ports.
#
# Sourced by: deploy/quickstart, deploy/bundle, deploy/restart, deploy/probe, tests/run.
# Fails how: one sentence on stderr and exit 2 (the set-up is wrong, trying again will not help).

top=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*"; }

die() { # exit-code sentence…
    local code=$1
    shift
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit "$code"
}

package_installed() { [[ $(dpkg-query -W -f='${db:Status-Abbrev}' "$1" 2>/dev/null) == ii* ]]; }

package_offered() {
    local candidate
    candidate=$(apt-cache policy "$1" 2>/dev/null | awk '$1 == "Candidate:" { print $2 }')
    [[ -n $candidate && $candidate != "(none)" ]]
}

# Runs a command as root: directly, or through sudo.
as_root() {
    if ((EUID == 0)); then
        "$@"
    else
        sudo "$@"
    fi
}

# packages_need GROUP…: installs what is missing of these groups of deploy/packages. Nothing missing:
# no apt command runs, so no root and no network are needed.
packages_need() {
    local group names name found missing=() install=() wanted=" $* "
    while read -r group names _; do
        [[ -z $group || $group == \#* || $wanted != *" $group "* ]] && continue
        found=
        for name in ${names//|/ }; do
            if package_installed "$name"; then found=$name && break; fi
        done
        [[ -n $found ]] || missing+=("$names")
    done <"$top/deploy/packages"
    ((${#missing[@]})) || return 0

    command -v apt-get >/dev/null ||
        die 2 "expected a Debian or Ubuntu system (apt-get), or these packages installed by hand: ${missing[*]}"
    if ((EUID != 0)) && ! command -v sudo >/dev/null; then
        die 2 "these packages are missing and need root or sudo to install: ${missing[*]}"
    fi
    say "installing: ${missing[*]}"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q update >/dev/null ||
        die 2 "apt-get update failed; these packages are missing: ${missing[*]}"
    for names in "${missing[@]}"; do
        found=
        for name in ${names//|/ }; do
            if package_offered "$name"; then found=$name && break; fi
        done
        [[ -n $found ]] || die 2 "expected a package named ${names//|/ or } in this distribution, found none"
        install+=("$found")
    done
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -q -y --no-install-recommends install "${install[@]}" >/dev/null ||
        die 2 "apt-get could not install: ${install[*]}"
}

# The program octavo: what OCTAVO says, else beside deploy/, in build/, or on the search path.
find_octavo() {
    local program places=("$top/octavo" "$top/build/octavo" "$(command -v octavo || true)")
    [[ -z ${OCTAVO-} ]] || places=("$OCTAVO")
    for program in "${places[@]}"; do
        [[ -f $program && -x $program ]] && printf '%s\n' "$program" && return
    done
    return 1
}

gpu_here() { compgen -G '/proc/driver/nvidia/gpus/*' >/dev/null; }

# build_programs DIR [octavo-worker-cuda]: sets DIR up if it is not, and builds the programs (not the
# tests) in it; the CUDA worker, which takes minutes to compile, only when asked for and when DIR has
# one. What meson and the compiler say goes to DIR/programs.log, and to stderr when they fail.
build_programs() {
    local dir=$1 log=$1/programs.log targets=(octavo octavo-worker)
    mkdir -p "$dir"
    {
        { [[ -f $dir/build.ninja ]] || meson setup "$dir" "$top" -Dtests=false; } &&
            ninja -C "$dir" build.ninja &&
            { [[ -z ${2-} ]] || ! ninja -C "$dir" -t query "$2" || targets+=("$2"); } &&
            ninja -C "$dir" "${targets[@]}"
    } >"$log" 2>&1 || {
        tail -n 40 "$log" >&2
        die 1 "the build failed; all of it is in $log"
    }
}

port_taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
