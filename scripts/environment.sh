# Virtual environments for run.sh and test.sh, which source this file in the repository's root.
#
#   find_python 3.12              print a Python of exactly that version; fail when there is none
#   card_extra                    print the extra for the card of this machine, if it has one
#   set_up DIR PYTHON EXTRA...    make or update the environment DIR
#
# set_up returns at once when DIR has all the extras of the present pyproject.toml. It may be
# killed at any moment: an install that did not finish is started again from an empty folder. A
# folder that it did not make is used when it fits, and otherwise left alone, with an error.

find_python() {
    local name path
    for name in "python$1" python3 python; do
        path=$(command -v "$name") || continue
        # A version manager's shim may be there without the version; a system's Python may lack
        # ensurepip, without which no environment can be made.
        if "$path" -c "import ensurepip, venv" >/dev/null 2>&1 &&
            [ "$(python_version "$path")" = "$1" ]; then
            echo "$path"
            return 0
        fi
    done
    return 1
}

python_version() {
    "$1" -c "import sys; print('%d.%d' % sys.version_info[:2])" 2>/dev/null
}

card_extra() {
    local version # of CUDA, the newest that the driver serves
    version=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[^:]*Version: *\([0-9]*\).*/\1/p' | head -n 1)
    if [ "${version:-0}" -ge 13 ]; then
        echo cuda13
    elif [ "${version:-0}" -eq 12 ]; then
        echo cuda12
    fi
}

set_up() (
    env=$1 python=$2 stamp=$1/installed unfinished=$1/unfinished
    shift 2
    # One set-up at a time, where the system has flock.
    if command -v flock >/dev/null; then
        exec 9<pyproject.toml
        flock 9
    fi
    version=$(python_version "$python")
    wanted="$version $(cat pyproject.toml scripts/constraints.txt scripts/environment.sh | cksum)"
    installed=$(sed -n 1p "$stamp" 2>/dev/null || true)
    extras=$(printf '%s\n' $installed "$@" | sort -u | xargs) # what was asked for before stays
    works=$(python_version "$env/bin/python" || true)
    if [ "$(sed 1d "$stamp" 2>/dev/null)" = "$wanted" ] && [ "$extras" = "$installed" ] &&
        [ "$works" = "$version" ]; then
        exit 0
    fi

    echo "setting up $env: Python $version${extras:+, $extras}" >&2
    if [ -e "$unfinished" ] || [ "$works" != "$version" ] ||
        ! "$env/bin/python" -m pip --version >/dev/null 2>&1; then
        if [ -n "$(ls -A "$env" 2>/dev/null)" ] && [ ! -e "$unfinished" ] && [ ! -e "$stamp" ]; then
            echo "$env is not an environment of Python $version with pip: remove it" >&2
            exit 1
        fi
        mkdir -p "$env"
        touch "$unfinished"
        find "$env" -mindepth 1 ! -path "$unfinished" -delete
        "$python" -m venv "$env"
    fi
    touch "$unfinished"
    rm -f "$stamp"
    pip="$env/bin/python -m pip install --quiet --disable-pip-version-check"
    $pip -c scripts/constraints.txt -e ".${extras:+[${extras// /,}]}"
    case " $extras " in
        # dflash's dependencies pin another transformers; its model file needs none of them.
        *" oracle "*) $pip --no-deps dflash==0.1.0 ;;
    esac
    printf '%s\n' "$extras" "$wanted" >"$unfinished"
    mv "$unfinished" "$stamp"
)
