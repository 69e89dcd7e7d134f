# Sourced by the scripts: where the repository is, and how it is configured and built. Leaves the caller in the root.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Parallel compilations: one per usable core, but no more than the free memory carries at 1.5 GiB each (the files
# that are compiled once per SIMD target are the heavy ones).
num_jobs() {
  local cores memory_kib by_memory
  cores=$(nproc 2>/dev/null || echo 2)
  memory_kib=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo 2>/dev/null || true)
  by_memory=$(( ${memory_kib:-4194304} / 1572864 ))
  (( by_memory < 1 )) && by_memory=1
  echo $(( cores < by_memory ? cores : by_memory ))
}

# configure PRESET [cmake arguments]: quiet unless it fails.
configure() {
  local preset=$1 log=build/$1-configure.log
  shift
  mkdir -p build
  local launcher=()
  command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  echo "== $preset: configure"
  if ! cmake --preset "$preset" "${launcher[@]}" "$@" >"$log" 2>&1; then
    cat "$log" >&2
    return 1
  fi
}

# build PRESET [cmake --build arguments]
build() {
  local preset=$1
  shift
  echo "== $preset: build"
  cmake --build --preset "$preset" --parallel "$(num_jobs)" "$@"
}
