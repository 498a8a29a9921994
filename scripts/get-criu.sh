#!/usr/bin/env bash
# Provides CRIU under a prefix of its own: get-criu.sh [PREFIX]   (default: .prefix/criu in the repository)
#
# Wanted is 4.2 or newer: on kernels from 6.16 on, older ones cannot save a process that has a network socket. At least
# 4.1 is needed: older ones do not work at all on kernels from 6.13 on. Where the distribution's own CRIU is new enough
# the prefix only points to it. Elsewhere Debian's packages (criu and every library it needs, libc included) are taken
# from the mirror that this machine's own apt configuration names, signatures checked with Debian's keyring, and
# unpacked into the prefix; nothing is installed. PREFIX/bin/criu runs them through their own dynamic loader, finds
# itself by its own path, and so works wherever the prefix is copied to. Must never change the machine's package state,
# name a host, or leave a half-made prefix: everything is made beside it and renamed.
#
# Environment: WOODFROG_DEBIAN_MIRROR   base URI of a Debian mirror, for machines whose apt names none
#              WOODFROG_DEBIAN_KEYRING  keyring that holds the release's key
set -euo pipefail

wanted=4.2
minimum=4.1
suites=(forky trixie) # Debian 14 has criu 4.2, Debian 13 has 4.1

here=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)
prefix=$(readlink -m "${1:-$here/.prefix/criu}")

say() { printf 'get-criu: %s\n' "$*" >&2; }
fail() {
    say "$1"
    [ -z "${2:-}" ] || say "what to do: $2"
    exit 1
}

# version_of PROGRAM: "4.1.1", or nothing when it does not run
version_of() { "$1" --version 2>/dev/null | sed -n 's/^Version: *\([0-9][0-9.]*\).*/\1/p'; }
# at_least MINIMUM VERSION
at_least() { [ -n "$2" ] && [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }

check() {
    local output version
    version=$(version_of "$prefix/bin/criu")
    at_least "$wanted" "$version" ||
        say "note: criu $version cannot save processes that have network sockets on kernels from 6.16 on (this is $(uname -r))"
    if [ "$(id -u)" -ne 0 ]; then
        say "criu $version in $prefix (not root: 'criu check' left out)"
        return 0
    fi
    # --libdir: an empty folder keeps CRIU's plugins out, as woodfrog does at dump and restore
    if output=$("$prefix/bin/criu" check --libdir "$prefix/plugins" 2>&1); then
        say "criu $version in $prefix: $(printf '%s\n' "$output" | tail -n 1)"
    else
        printf '%s\n' "$output" >&2
        fail "criu is in $prefix, but 'criu check' says that this kernel ($(uname -r)) lacks something it needs." \
            "woodfrog can still suspend and resume; checkpoints to an image need what the lines above name."
    fi
}

# install_tree TREE: puts the finished folder in the prefix's place
install_tree() {
    local old="$prefix.old.$$"
    chmod 755 "$1"
    [ ! -e "$prefix" ] || mv -T "$prefix" "$old"
    mv -T "$1" "$prefix"
    rm -rf "$old"
}

mkdir -p "$(dirname "$prefix")"
exec 9>"$prefix.lock"
flock 9 # two builds at once: the second waits and finds the work done

present=$(version_of "$prefix/bin/criu" || true)
if at_least "$wanted" "$present"; then
    check
    exit 0
fi

work=$(mktemp -d "$prefix.new.XXXXXX")
trap 'rm -rf "$work"' EXIT
tree=$work/tree
mkdir -p "$tree/bin" "$tree/plugins"

system=$(PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin command -v criu || true)
use_system() {
    printf '#!/bin/sh\nexec "%s" "$@"\n' "$(readlink -f "$system")" >"$tree/bin/criu"
    chmod 755 "$tree/bin/criu"
    install_tree "$tree"
    check
    exit 0
}
if [ -n "$system" ] && at_least "$wanted" "$(version_of "$system" || true)"; then
    use_system
fi

# settle REASON ADVICE: a newer one cannot be had; one that is at least the minimum will do
settle() {
    if at_least "$minimum" "$present"; then
        say "$1"
        check
        exit 0
    fi
    if [ -n "$system" ] && at_least "$minimum" "$(version_of "$system" || true)"; then
        say "$1"
        use_system
    fi
    fail "$1" "$2"
}

for tool in apt-get apt-config dpkg-deb; do
    command -v "$tool" >/dev/null || settle "there is no criu >= $wanted here, and without $tool this script cannot fetch one." \
        "install criu >= $minimum with your distribution's means, or set WOODFROG_CRIU to a criu program."
done

# A private apt: the machine's settings (proxies, certificates, time-outs) without its folders, hooks and sources.
apt=$work/apt
mkdir -p "$apt/sources" "$apt/state/lists/partial" "$apt/cache/archives/partial"
chmod -R a+rX "$work" # apt downloads as its own user
: >"$apt/state/status" # "nothing is installed": the whole closure is resolved, libc included
{
    apt-config dump | grep -vE '^(Dir|DPkg|Binary|APT::(Update|Get|Periodic|Install))\b'
    printf '%s "%s";\n' \
        Dir::Etc::Main /dev/null Dir::Etc::Parts /dev/null Dir::Etc::PreferencesParts /dev/null \
        Dir::Etc::Preferences /dev/null Dir::Etc::SourceList /dev/null Dir::Etc::SourceParts "$apt/sources" \
        Dir::State "$apt/state" Dir::State::status "$apt/state/status" Dir::Cache "$apt/cache" \
        APT::Install-Recommends false APT::Update::Error-Mode any Acquire::Retries 3 Acquire::Languages none
} >"$apt/apt.conf"
private() { APT_CONFIG=$apt/apt.conf "$@"; }

# The bases of the configured sources, those of this machine's own release first.
mirrors() {
    if [ -n "${WOODFROG_DEBIAN_MIRROR:-}" ]; then
        printf '%s\n' "${WOODFROG_DEBIAN_MIRROR%/}"
        return
    fi
    local codename
    codename=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-none}")
    apt-get update --print-uris -o Dir::State::lists="$apt/none" 2>/dev/null |
        sed -n "s#^'\\(.*\\)/dists/\\([a-z]*\\)/InRelease'.*#\\2 \\1#p" |
        awk -v own="$codename" '{ print ($1 == own ? 0 : 1), $2 }' | sort -s -k1,1n | awk '!seen[$2]++ { print $2 }'
}
mkdir -p "$apt/none/partial"

# The keyring of this machine; where it is too old for the release, the newest one that its own apt offers.
keyring() {
    local candidate
    for candidate in "${WOODFROG_DEBIAN_KEYRING:-}" /usr/share/keyrings/debian-archive-keyring.{pgp,gpg}; do
        if [ -n "$candidate" ] && [ -r "$candidate" ]; then
            printf '%s\n' "$candidate"
            return
        fi
    done
}
newer_keyring() {
    (cd "$work" && apt-get download -qq debian-archive-keyring >/dev/null 2>&1 &&
        dpkg-deb -x debian-archive-keyring_*.deb keyring) || return 0
    find "$work/keyring" -name 'debian-archive-keyring.[pg][gp]*' -print -quit
}

# fetch MIRROR KEYRING SUITE: criu and everything it needs into the private cache
fetch() {
    printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' "$1" "$3" "$2" \
        >"$apt/sources/criu.sources"
    rm -rf "$apt"/state/lists/* "$apt"/cache/archives/*
    mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial"
    chmod -R a+rX "$apt"
    private apt-get update -qq >"$work/log" 2>&1 &&
        private apt-get install -qq -y --download-only criu >>"$work/log" 2>&1
}

# fetch_any SUITE: from the first mirror that has it, with this machine's keyring or else a newer one
fetch_any() {
    local base ring
    for ring in "$(keyring)" newer; do
        [ "$ring" != newer ] || ring=$(newer_keyring)
        [ -n "$ring" ] || continue
        have_keyring=yes
        for base in "${bases[@]}"; do
            if fetch "$base" "$ring" "$1"; then return 0; fi
        done
    done
    return 1
}

# unpack: the fetched packages into the tree; prints nothing, fails when what came out does not run
unpack() {
    rm -rf "$work/unpacked" "$tree/lib" "$tree/licenses"
    mkdir -p "$work/unpacked" "$tree/lib" "$tree/licenses"
    local package loader notice
    for package in "$apt"/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$work/unpacked"
    done
    cp "$work/unpacked/usr/sbin/criu" "$tree/bin/criu.program"
    # Libraries only, flat, links kept; what programs load by name at run time (gconv, nss, preloads) is not needed.
    find "$work/unpacked" -path '*/gconv' -prune -o \( -type f -o -type l \) -name '*.so*' \
        ! -name 'libnss_*' ! -name 'libmemusage*' ! -name 'libpcprofile*' ! -name 'libc_malloc_debug*' \
        ! -name 'libmvec*' -exec cp -P {} "$tree/lib/" \;
    # The loader may come as a link into another folder: keep the file itself under its name.
    loader=$(find "$work/unpacked" -name 'ld-linux-*.so.*' -type f -print -quit)
    [ -n "$loader" ] || return 1
    rm -f "$tree/lib/$(basename "$loader")"
    cp "$loader" "$tree/lib/"
    chmod 755 "$tree/bin/criu.program" "$tree/lib/$(basename "$loader")"
    for notice in "$work"/unpacked/usr/share/doc/*/copyright; do
        [ -e "$notice" ] || continue # a link into a package that was not taken
        cp -L "$notice" "$tree/licenses/$(basename "$(dirname "$notice")")"
    done
    # "$0" may be a link: the prefix is where the file itself lies. A target stands still while this runs, so it starts
    # no other program where it need not.
    cat >"$tree/bin/criu" <<'WRAPPER'
#!/bin/sh
# Runs the CRIU of this prefix with this prefix's own C library.
program=$0
case $program in */*) ;; *) program=./$program ;; esac
[ ! -h "$program" ] || program=$(readlink -f "$program")
prefix=${program%/*}/..
for loader in "$prefix"/lib/ld-linux-*.so.*; do
    exec "$loader" --library-path "$prefix/lib" "$prefix/bin/criu.program" "$@"
done
WRAPPER
    chmod 755 "$tree/bin/criu"
    at_least "$minimum" "$(version_of "$tree/bin/criu" || true)"
}

have_keyring=
mapfile -t bases < <(mirrors)
[ "${#bases[@]}" -gt 0 ] || settle "this machine's apt names no source to derive a Debian mirror from." \
    "set WOODFROG_DEBIAN_MIRROR to a Debian mirror, or WOODFROG_CRIU to a criu >= $minimum."
for suite in "${suites[@]}"; do
    # An older release's criu is no gain over one that is there already.
    [ "$suite" != trixie ] || ! at_least "$minimum" "$present" || continue
    if fetch_any "$suite" && unpack; then
        version=$(version_of "$tree/bin/criu")
        install_tree "$tree"
        say "criu $version from Debian $suite"
        check
        exit 0
    fi
    say "Debian $suite gave no criu that runs here"
done
[ ! -s "$work/log" ] || tail -n 5 "$work/log" >&2
[ -n "$have_keyring" ] || settle "Debian's keyring is not on this machine, so packages could not be trusted." \
    "apt-get install debian-archive-keyring, or set WOODFROG_DEBIAN_KEYRING."
settle "none of this machine's apt sources gave a criu (last answer above)." \
    "set WOODFROG_DEBIAN_MIRROR to a Debian mirror, or WOODFROG_CRIU to a criu >= $minimum."
