# python -m pytest tests/test_launch.py
"""mpi_launch.sh: the command it would start, its refusals, and when it installs.

Installing is tried against a fake python3 that writes down what it is asked, in a folder that has
the script and the packaging files only.
"""

import os
import pathlib
import shlex
import shutil
import stat
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = f"{ROOT}/.venv/bin"
SHELL = ["sh", "-c", 'trap : HUP INT TERM USR1; "$@"; exit $?', "rank"]
PLAIN = {name: value for name, value in os.environ.items() if name != "SPARKGRID_MPI"}


def launch(*args, root=ROOT, cwd=None, path=None, **env):
    env = {**PLAIN, **env}
    if path is not None:
        env["PATH"] = f"{path}:/usr/bin:/bin"
    return subprocess.run([str(root / "mpi_launch.sh"), *args], capture_output=True, text=True,
                          env=env, cwd=cwd or root, timeout=60)


def write_script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# ---- the command -------------------------------------------------------------------------------

@pytest.mark.parametrize("args, mpirun, engine", [
    ((), ["-np", "6"], []),
    (("-n", "3"), ["-np", "3"], []),
    (("--model", "a b", "-n", "1", "--json"), ["-np", "1"], ["--model", "a b", "--json"]),
    (("--hosts", "a,b,c"), ["-np", "3", "-hosts", "a,b,c"], []),
    (("--hosts=a,b", "-n", "4", "plan"), ["-np", "4", "-hosts", "a,b"], ["plan"]),
    (("--prompt", "-n", "-n", "2"), ["-np", "2"], ["--prompt", "-n"]),
    (("--prompt", "it's; $HOME"), ["-np", "6"], ["--prompt", "it's; $HOME"]),
    (("--prompt", ""), ["-np", "6"], ["--prompt", ""]),
])
def test_dry_run_prints_the_command_and_starts_nothing(args, mpirun, engine, tmp_path):
    done = launch("--dry-run", *args, cwd=tmp_path, path=tmp_path)
    assert shlex.split(done.stdout) == [
        f"{VENV}/python", "-m", "engine.keeper", f"{VENV}/mpirun", "-disable-auto-cleanup", *mpirun,
        *SHELL, f"{VENV}/python", "-m", "engine", *engine]
    assert done.returncode == 0 and done.stderr == "" and not list(tmp_path.iterdir())


def test_supervised_the_front_gets_the_options():
    words = shlex.split(launch("--dry-run", "--supervise", "-n", "2", "--port", "80").stdout)
    assert words[:5] == [f"{VENV}/python", "-m", "engine.front", "--port", "80"]
    assert words[5:] == ["--", f"{VENV}/mpirun", "-disable-auto-cleanup", "-np", "2", *SHELL,
                         f"{VENV}/python", "-m", "engine"]


@pytest.mark.parametrize("options, url, key", [
    ((), "http://127.0.0.1:8114", []), (("--port", "80"), "http://127.0.0.1:80", []),
    (("--port=81", "--api-key=k"), "http://127.0.0.1:81", ["--api-key", "k"])])
def test_the_console_starts_the_engine(options, url, key):
    words = shlex.split(launch("--dry-run", "--tui", "-n", "2", *options).stdout)
    start = words.index("--start")
    assert words[:start] == [f"{VENV}/python", "-m", "tui", "--connect", url, *key]
    assert words[start + 1:] == shlex.split(launch("--dry-run", "-n", "2", *options).stdout)


@pytest.mark.parametrize("signal, code", [("", 7), ("kill -9 $$; ", 128 + 9)])
def test_the_shell_above_a_rank_passes_its_code_on(signal, code):
    rank = ["sh", "-c", f"{signal}exit 7"]
    assert subprocess.run([*SHELL, *rank], stderr=subprocess.DEVNULL).returncode == code


@pytest.mark.parametrize("version, hosts", [
    ("mpirun (Open MPI) 5.0.11", "--host"), ("HYDRA build details:", "-hosts")])
def test_the_systems_mpirun_and_its_switches(version, hosts, tmp_path):
    write_script(tmp_path / "mpirun", f"echo '{version}'\n")
    done = launch("--dry-run", "--hosts", "a,b", path=tmp_path, SPARKGRID_MPI="system")
    words = shlex.split(done.stdout)
    at = words.index(f"{tmp_path}/mpirun")
    switches = set(words[4:at])
    if hosts == "-hosts":
        assert at == 3 and words[4:9] == ["-disable-auto-cleanup", "-np", "2", hosts, "a,b"]
    else:
        assert words[at + 1:at + 6] == ["-np", "2", hosts, "a,b", f"{VENV}/python"]
        assert words[3] == "env" and "OMPI_MCA_rmaps_base_oversubscribe=1" in switches
        assert "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe" in switches
        assert ("OMPI_ALLOW_RUN_AS_ROOT=1" in switches) == (os.getuid() == 0)


def test_help_says_what_there_is():
    done = launch("--help")
    assert done.returncode == 0 and done.stderr == ""
    for word in ("-n RANKS", "--hosts", "--model", "--supervise", "--no-tui", "--dry-run",
                 "test", "SPARKGRID_MPI"):
        assert word in done.stdout


@pytest.mark.parametrize("args, env, what", [
    (("-n", "9"), {}, "'9' is not a number of ranks"),
    (("-n", "0"), {}, "'0' is not a number of ranks"),
    (("-n", "two"), {}, "'two' is not a number of ranks"),
    (("-n",), {}, "-n needs a value"),
    (("--json", "--prompt"), {}, "--prompt needs a value"),
    (("--hosts", "a,,b"), {}, "--hosts 'a,,b' is not a list of names"),
    (("--hosts", "a;b"), {}, "--hosts 'a;b' is not a list of names"),
    (("--hosts", "a,b,c,d,e,f,g,h,i"), {}, "'9' is not a number of ranks"),
    (("--dry-run",), {"SPARKGRID_MPI": "mpich"}, "SPARKGRID_MPI is 'mpich'"),
    (("--dry-run",), {"SPARKGRID_MPI": "system"}, "no mpirun is on PATH"),
])
def test_refusals_name_the_remedy(args, env, what, tmp_path):
    for tool in ("bash", "env", "dirname", "cat", "id", "grep"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = subprocess.run([str(ROOT / "mpi_launch.sh"), *args], capture_output=True, text=True,
                          env={**PLAIN, "PATH": str(tmp_path), **env}, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    first, second = done.stderr.splitlines()
    assert what in first and second.startswith("  remedy: ") and len(second) > 12


# ---- installing --------------------------------------------------------------------------------

FAKE_PYTHON = r"""
printf '%s\n' "${0##*/} $*" >>"$LOG"
case "$*" in
    "-m venv --clear "*)
        if [[ $FAKE == *novenv* && $* != *--without-pip* ]]; then exit 1; fi
        if [[ $FAKE == *nothing* ]]; then exit 1; fi
        folder=${@: -1}
        mkdir -p "$folder/bin"
        cp "$0" "$folder/bin/python" ;;
    "-m pip --version") if [[ $FAKE == *nopip* || $0 == */.venv/* && $FAKE == *novenv* ]]; then
        exit 1; fi ;;
    *" install "*)
        if [[ $FAKE == *offline* ]]; then echo 'no route to index'; exit 1; fi
        printf '#!/usr/bin/env bash\nprintf "MPIRUN %%s\\n" "$*" >>"$LOG"\n' >.venv/bin/mpirun
        chmod +x .venv/bin/mpirun ;;
    "-m pytest -n "*) if [[ $FAKE == *failing* ]]; then exit 1; fi ;;
esac
"""


@pytest.fixture
def tree(tmp_path):
    """start(*args, FAKE=...) -> (CompletedProcess, what python and mpirun were asked)."""
    root = tmp_path / "tree with space"
    root.mkdir()
    for name in ("mpi_launch.sh", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    (root / "engine").mkdir()
    (root / "engine/__init__.py").touch()
    write_script(tmp_path / "bin/python3", FAKE_PYTHON)
    log = tmp_path / "log"

    def start(*args, FAKE="", **env):
        log.write_text("")
        done = launch(*args, root=root, path=tmp_path / "bin", LOG=str(log), FAKE=FAKE, **env)
        asked = [line for line in log.read_text().splitlines()
                 if line.split()[1:2] != ["-c"] and line != "MPIRUN --version"]
        return done, asked

    start.root = root
    return start


def started(line):
    """What it started ranks with, None where it did something else."""
    return line if line.startswith("python -m engine.") else None


def installs(asked):
    return [line.split()[-1] for line in asked if " install " in line]


def test_installs_once_and_again_when_setup_cfg_changes(tree):
    done, asked = tree("-n", "2", "--json")
    assert done.returncode == 0 and done.stdout == ""
    assert asked[0].startswith("python3 -m venv --clear") and installs(asked) == [".[mpi]"]
    assert asked[-1] == (f"python -m engine.keeper {tree.root}/.venv/bin/mpirun "
                         f"-disable-auto-cleanup -np 2 {' '.join(SHELL)} "
                         f"{tree.root}/.venv/bin/python -m engine --json")
    assert "making" in done.stderr and "installing sparkgrid with mpi" in done.stderr

    done, asked = tree()
    assert len(asked) == 1 and "-np 6" in started(asked[0])
    assert done.stderr == "mpi_launch: starting 6 ranks\n"

    with open(tree.root / "setup.cfg", "a") as f:
        f.write("\n")
    assert installs(tree()[1]) == [".[mpi]"] and installs(tree()[1]) == []


def test_test_installs_what_the_tests_need_and_runs_them(tree):
    assert installs(tree()[1]) == [".[mpi]"]
    done, asked = tree("test", "-k", "pool")
    assert installs(asked) == [".[mpi,test]"] and asked[-1] == "python -m pytest -k pool"
    assert installs(tree()[1]) == []  # the larger installation serves the ranks too


def test_all_tests_run_in_two_goes_and_either_may_fail(tree):
    for fake, code in (("", 0), ("failing", 1)):
        done, asked = tree("test", FAKE=fake)
        assert done.returncode == code
        assert asked[-2:] == [
            "python -m pytest -n auto --maxprocesses 8 -m not gpu and not mpi",
            "python -m pytest -m mpi and not gpu"]


def test_the_systems_mpi_is_not_joined_by_another(tree, tmp_path):
    write_script(tmp_path / "bin/mpirun", 'printf "SYSTEM %s\\n" "$*" >>"$LOG"\n')
    done, asked = tree(SPARKGRID_MPI="system")
    assert installs(asked) == ["."] and started(asked[-1]), done.stderr
    assert f"{tmp_path}/bin/mpirun" in asked[-1]
    assert installs(tree("test", SPARKGRID_MPI="system")[1]) == [".[test]"]


def test_a_python_without_ensurepip_uses_the_systems_pip(tree):
    done, asked = tree(FAKE="novenv")
    assert done.returncode == 0, done.stderr
    assert f"python3 -m pip --python {tree.root}/.venv/bin/python install" in "\n".join(asked)


@pytest.mark.parametrize("fake, what, remedy", [
    ("novenv nopip", "python3 cannot make a virtual environment", "apt-get install python3-venv"),
    ("nothing", "python3 cannot make a virtual environment", "apt-get install python3-venv"),
    ("offline", "pip could not install .[mpi]", "needs the network"),
])
def test_what_cannot_be_installed_is_said_and_nothing_starts(tree, fake, what, remedy):
    done, asked = tree(FAKE=fake)
    assert done.returncode == 2 and what in done.stderr and remedy in done.stderr
    assert not any(map(started, asked))
    assert installs(tree()[1]) == [".[mpi]"]  # the next try starts over


def test_a_moved_tree_and_a_broken_environment_install_again(tree):
    tree()
    moved = tree.root.rename(tree.root.parent / "moved")
    done = launch(root=moved, path=moved.parent / "bin", LOG=str(moved.parent / "log"), FAKE="")
    assert "installing" in done.stderr and "making" not in done.stderr
    (moved / ".venv/bin/python").write_text("#!/no/such/python\n")
    done = launch(root=moved, path=moved.parent / "bin", LOG=str(moved.parent / "log"), FAKE="")
    assert "making" in done.stderr and done.returncode == 0
