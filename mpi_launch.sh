#!/usr/bin/env bash
# Starts the engine's ranks on a machine that has Python only: makes .venv, installs, runs mpirun.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv
ranks=""
hosts=""
dry_run=no
supervise=no
console=auto
port=8114
key=""
engine=()

usage() {
    cat <<'TEXT'
usage: ./mpi_launch.sh [-n RANKS] [--hosts A,B,C] [--model PATH] [engine options]
       ./mpi_launch.sh test [pytest options]

Makes .venv and installs what is missing, then starts the engine's ranks with mpirun, on a
terminal together with the console, which stops them when it is left.

  -n RANKS        ranks, 1 to 8 (default: one a host with --hosts, else 6)
  --hosts A,B,C   machines to start them on; each needs this folder at the same path, with its
                  .venv, and ssh without a password
  --model PATH    model folder (default: the embedded model)
  --supervise     hold the port, and start the engine again when it fails: clients get errors to
                  try again on (503), not closed doors
  --no-tui        no console: serve, and chat by lines; --tui: the console, terminal or not
  --dry-run       print the command and stop
  -h, --help      print this and stop
  test            install what the tests need and run them

Every other option goes to the engine: .venv/bin/python -m engine --help lists them.

SPARKGRID_MPI=system takes the mpirun on PATH (a CUDA-aware one, say) in place of the pip package's.
TEXT
}

say() { printf 'mpi_launch: %s\n' "$*" >&2; }

die() { # what happened, remedy
    printf 'mpi_launch: %s\n  remedy: %s\n' "$1" "$2" >&2
    exit 2
}

# ---- the environment -------------------------------------------------------------------------

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if new_enough "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    die "no Python 3.11 or newer on PATH" \
        "install one; on Debian 12 or newer: apt-get install python3 python3-venv"
}

make_venv() { # python
    say "making $venv with $(command -v "$1")"
    if "$1" -m venv --clear "$venv" >/dev/null 2>&1; then return; fi
    # Debian keeps venv's pip in a package of its own; the system's pip can install from outside.
    if "$1" -m pip --version >/dev/null 2>&1 && "$1" -m venv --clear --without-pip "$venv"; then
        return
    fi
    rm -rf "$venv"
    die "$1 cannot make a virtual environment" "on Debian: apt-get install python3-venv"
}

pip_install() { # what
    local python=$1 what=$2
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        set -- "$venv/bin/python" -m pip
    else
        set -- "$python" -m pip --python "$venv/bin/python"
    fi
    (cd "$root" && "$@" install --quiet --disable-pip-version-check -e "$what") >&2 ||
        die "pip could not install $what" \
            "read pip's message above; it needs the network and about 1 GB of disk"
}

stamp_of() { # what an installation depends on: this folder, its packages, these files
    (cd "$root" && printf '%s\n' "$root" ./*/__init__.py && cat setup.cfg pyproject.toml) | cksum
}

ensure() { # extras...
    local python extra stamp missing=""
    exec 9>"$root/.venv.lock"
    if command -v flock >/dev/null; then flock 9; fi # two launches at once install once
    python=$(find_python)
    new_enough "$venv/bin/python" || make_venv "$python"
    stamp=$(stamp_of)
    for extra in base "$@"; do
        if [[ $(cat "$venv/.installed-$extra" 2>/dev/null) != "$stamp" ]]; then missing=yes; fi
    done
    if [[ $missing ]]; then
        local list
        list=$(IFS=,; printf '%s' "$*")
        say "installing sparkgrid${list:+ with $list} into $venv"
        pip_install "$python" ".${list:+[$list]}"
        for extra in base "$@"; do printf '%s\n' "$stamp" >"$venv/.installed-$extra"; done
    fi
    exec 9>&-
}

# ---- mpirun ----------------------------------------------------------------------------------

find_mpirun() {
    if [[ ${SPARKGRID_MPI:-} != system ]]; then
        printf '%s\n' "$venv/bin/mpirun"
    elif ! command -v mpirun; then
        die "SPARKGRID_MPI=system, and no mpirun is on PATH" \
            "put it on PATH, or unset SPARKGRID_MPI to use the pip package's"
    fi
}

launch() {
    local mpirun command=()
    mpirun=$(find_mpirun)
    if "$mpirun" --version 2>/dev/null | grep -q 'Open MPI\|OpenRTE'; then
        # It refuses root, and more ranks than cores; 4 reads OMPI_*, 5 reads PRTE_*.
        command=(env OMPI_MCA_rmaps_base_oversubscribe=1
                 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe)
        if [[ $(id -u) == 0 ]]; then
            command+=(OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)
        fi
        command+=("$mpirun" -np "$ranks" ${hosts:+--host "$hosts"})
    else
        # mpirun kills all ranks at once with one that dies, before they can say which. The switch
        # stops that where a rank ends by itself, and the shell above each where a signal ends it.
        command=("$mpirun" -disable-auto-cleanup -np "$ranks" ${hosts:+-hosts "$hosts"}
                 sh -c 'trap : HUP INT TERM USR1; "$@"; exit $?' rank)
    fi
    command+=("$venv/bin/python" -m engine)
    if [[ $supervise == yes ]]; then
        command=("$venv/bin/python" -m engine.front ${engine[@]+"${engine[@]}"} -- "${command[@]}")
    else
        command=("$venv/bin/python" -m engine.keeper "${command[@]}" ${engine[@]+"${engine[@]}"})
    fi
    if [[ $console == yes ]]; then
        command=("$venv/bin/python" -m tui --connect "http://127.0.0.1:$port"
                 ${key:+--api-key "$key"} --start "${command[@]}")
    fi
    if [[ $dry_run == yes ]]; then
        printf '%q ' "${command[@]}"
        printf '\n'
        exit 0
    fi
    say "starting $ranks rank$( ((ranks == 1)) || printf s)${hosts:+ on $hosts}"
    exec "${command[@]}"
}

# ---- the command line ------------------------------------------------------------------------

value_of() { # option, words left
    (($2 > 1)) || die "$1 needs a value" "./mpi_launch.sh --help"
}

extras=(mpi)
case ${SPARKGRID_MPI:-} in
    '') ;;
    system) extras=() ;;
    *) die "SPARKGRID_MPI is '$SPARKGRID_MPI'" "set it to system, or unset it" ;;
esac

if [[ ${1:-} == test ]]; then
    shift
    ensure ${extras[@]+"${extras[@]}"} test
    cd "$root"
    say "running the tests"
    (($# == 0)) || exec "$venv/bin/python" -m pytest "$@"
    # side by side where a test takes one core, then those whose ranks take all there are
    failed=0
    "$venv/bin/python" -m pytest -n auto --maxprocesses 8 -m 'not gpu and not mpi' || failed=$?
    "$venv/bin/python" -m pytest -m 'mpi and not gpu' || failed=$?
    exit "$failed"
fi

while (($#)); do
    case $1 in
        -n | -np) value_of "$1" $#; ranks=$2; shift 2 ;;
        --hosts) value_of "$1" $#; hosts=$2; shift 2 ;;
        --hosts=*) hosts=${1#*=}; shift ;;
        --dry-run) dry_run=yes; shift ;;
        --supervise) supervise=yes; shift ;;
        --tui) console=yes; shift ;;
        --no-tui) console=no; shift ;;
        --port=*) port=${1#*=}; engine+=("$1"); shift ;;
        --port) value_of "$1" $#; port=$2; engine+=("$1" "$2"); shift 2 ;;
        --api-key=*) key=${1#*=}; engine+=("$1"); shift ;;
        --api-key) value_of "$1" $#; key=$2; engine+=("$1" "$2"); shift 2 ;;
        plan | bench | --prompt=* | --prompt-ids=*) one_shot=yes; engine+=("$1"); shift ;;
        -h | --help) usage; exit 0 ;;
        # A text may look like an option of this script.
        --prompt | --prompt-ids) value_of "$1" $#; one_shot=yes; engine+=("$1" "$2"); shift 2 ;;
        --system) value_of "$1" $#; engine+=("$1" "$2"); shift 2 ;;
        *) engine+=("$1"); shift ;;
    esac
done
if [[ $hosts ]]; then
    [[ $hosts =~ ^[A-Za-z0-9._:-]+(,[A-Za-z0-9._:-]+)*$ ]] ||
        die "--hosts '$hosts' is not a list of names" "--hosts spark1,spark2,spark3"
    commas=${hosts//[^,]/}
    : "${ranks:=$((${#commas} + 1))}"
fi
: "${ranks:=6}"
if [[ $console == auto ]]; then
    # A free port (0) is known to the engine alone, so a console could not find it.
    if [[ -t 0 && -t 1 && ! ${one_shot:-} && $port != 0 ]]; then console=yes; else console=no; fi
fi
[[ $ranks =~ ^[1-8]$ ]] || die "-n '$ranks' is not a number of ranks" "-n 1 to -n 8"
if [[ $dry_run == no ]]; then ensure ${extras[@]+"${extras[@]}"}; fi
launch
