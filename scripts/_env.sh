# Sourced by the other scripts: makes the repository's .venv when it is missing or outdated, then sets $root and $venv_python.
#
#   PYTHON=/path/to/python3.12   the interpreter for a new .venv: 3.11, 3.12 or 3.13; without it the first on the PATH
#
# pip's own variables work as ever. On Linux the default wheel of torch is built for CUDA and several gigabytes large;
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# gets the one for CPUs.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
venv_python=$venv/bin/python
# A line each: who made .venv ("script" or "user"), and from what. Written last, so an interrupted install has none.
stamp=$venv/.lightning_recsys
torch_version=2.13.0 # exact, and first: a looser range would let pip fetch every CUDA build to compare them

say() { printf 'lightning_recsys: %s\n' "$*" >&2; }

is_python() { # PYTHON MODULES: it is Python 3.11 to 3.13 and has these modules
    "$1" -c "import sys, $2; sys.exit(not (3, 11) <= sys.version_info < (3, 14))" 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3 python; do
        if is_python "$candidate" "venv, ensurepip"; then
            command -v "$candidate"
            return
        fi
        if [ -n "${PYTHON:-}" ]; then
            say "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13 with venv."
            return 1
        fi
    done
    say "needs Python 3.11, 3.12 or 3.13 with venv (Debian and Ubuntu: apt install python3.11-venv)." \
        "If it is not on the PATH, name it: PYTHON=/path/to/python3.12 $0"
    return 1
}

venv_works() { is_python "$venv_python" pip; }

fingerprint() {
    cat "$root/pyproject.toml" "$root/scripts/_env.sh" | cksum
    "$venv_python" -VV
    printf '%s\n' "$venv" # an editable install and the scripts in bin/ know their folder
}

is_current() {
    venv_works && [ -f "$stamp" ] && [ "$(tail -n +2 "$stamp")" = "$(fingerprint)" ]
}

give_up() {
    say "the installation failed; run the same command to try again."
    return 1
}

make_venv() {
    local maker=script python
    # One that somebody made by hand is added to; any other that is not current starts anew.
    if venv_works && [ "$(head -n 1 "$stamp" 2>/dev/null || echo user)" = user ] && [ ! -e "$stamp.unfinished" ]; then
        maker=user
        say "installing into the .venv that is there ..."
    else
        if [ -L "$venv" ]; then # what it points to belongs to another checkout, whose package it would import
            say ".venv is a link to $(readlink "$venv"), an environment that was not made for this folder." \
                "Remove the link, and run the same command to have one made here."
            return 1
        fi
        python=$(find_python) || return
        say "making .venv with $("$python" -V), one to five minutes, once ..."
        rm -rf "$venv" && mkdir "$venv" && touch "$stamp.unfinished" && "$python" -m venv "$venv" || give_up || return
    fi
    rm -f "$stamp"
    say "1/2 torch $torch_version ..."
    "$venv_python" -m pip install -qq "torch==$torch_version" || give_up || return
    say "2/2 everything else ..."
    "$venv_python" -m pip install -qq -e "$root[dev]" || give_up || return
    { echo "$maker" && fingerprint; } >"$stamp.new" && mv "$stamp.new" "$stamp"
    rm -f "$stamp.unfinished"
    say "ready."
}

ensure_venv() {
    is_current && return
    if command -v flock >/dev/null; then # two calls at once: the second waits, and finds the work done
        exec 9<"$root"
        flock -n 9 || { say "waiting for another install ..." && flock 9; }
    fi
    is_current || make_venv || return
    exec 9<&-
}

ensure_venv </dev/null || exit 1
