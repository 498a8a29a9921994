// The public face of the PTX interpreter: parse a PTX module, look at its kernels and variables, execute a kernel.
//
// Addresses that kernels see are 64-bit numbers. Global and constant addresses belong to the caller, who turns them
// into host pointers through `Memory`. Shared, local, parameter and launch-workspace memory live in windows above bit
// 56, inside this library, and never reach `Memory`. Nothing here must ever touch memory that `Memory` has not handed
// out, start a thread that outlives `execute`, or depend on anything but the C++ standard library.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace simgpu::ptx {

class Module;
class Program;

/// The text is not PTX that this library can read. `what()` is "line L, column C: message".
struct ParseError : std::runtime_error {
    ParseError(unsigned line_number, unsigned column_number, const std::string &text);

    unsigned line;
    unsigned column;
    std::string message;
};

/// A kernel stopped abnormally. `what()` is one sentence with everything below in it. Memory keeps whatever the kernel
/// had written before; the same kernel and memory may be used again.
struct Fault : std::runtime_error {
    enum class Kind {
        illegal_address,     ///< an access that Memory refused, or one beyond shared, local or parameter memory
        misaligned,          ///< an address that is not a multiple of the access size
        illegal_instruction, ///< a call of something that is no function, an impossible operand
        unsupported,         ///< an instruction, or a form of one, that this interpreter does not implement
        trap,                ///< `trap` or `brkpt` was executed
        assert_failed,       ///< a device-side assert; `detail` holds its text
        launch_timeout,      ///< every thread waits for another (a deadlock that would hang a GPU), or `cancel` was set
        invalid_launch,      ///< the launch does not fit the kernel (too few parameter bytes, too many threads, …)
        out_of_memory,       ///< local memory of a thread exceeded its limit, or the host has no memory left
    };

    Fault(Kind fault_kind, std::string kernel_name, unsigned source_line, std::uint64_t bad_address,
          std::array<unsigned, 3> block_id, std::array<unsigned, 3> thread_id, std::string text);

    Kind kind;
    std::string kernel;
    unsigned line;         ///< line of the PTX text, 0 when not known
    std::uint64_t address; ///< the offending address for illegal_address and misaligned, else 0
    std::array<unsigned, 3> block;
    std::array<unsigned, 3> thread;
    std::string detail;
};

const char *name(Fault::Kind kind) noexcept;

/// A kernel parameter: where it lies in the parameter block.
struct Parameter {
    std::size_t offset_bytes = 0;
    std::size_t size_bytes = 0;
    std::size_t alignment_bytes = 1;
};

/// An 8-byte little-endian (or 4-byte) slot in a variable's initial bytes which must be set to
/// `symbol_address(symbol) + addend` before the variable is used. Only variables are named here: addresses of
/// functions are numbers that the library itself has already written into the initial bytes.
struct Relocation {
    std::size_t offset_bytes = 0;
    std::size_t size_bytes = 8;
    std::string symbol;
    std::int64_t addend = 0;
};

/// A module-scope variable of the .global or .const space. The caller places it and answers `Memory::symbol_address`.
struct Variable {
    enum class Space { global, constant };

    std::string name;
    Space space = Space::global;
    std::size_t size_bytes = 0; ///< 0 for an unsized .extern array
    std::size_t alignment_bytes = 1;
    bool is_extern = false;              ///< declared here, defined elsewhere
    std::vector<std::byte> initial;      ///< at most size_bytes; what follows is zero
    std::vector<Relocation> relocations; ///< in order of offset
};

/// A kernel of a module. Copies are cheap and keep the module alive.
class Kernel {
  public:
    const std::string &name() const noexcept { return name_; }
    const std::vector<Parameter> &parameters() const noexcept { return parameters_; }
    /// Bytes that a launch must pass: the end of the last parameter.
    std::size_t parameters_bytes() const noexcept;
    /// Static shared memory that the kernel and the functions it calls declare.
    std::size_t static_shared_bytes() const noexcept { return static_shared_bytes_; }
    /// Threads a block may have: the product of .maxntid or .reqntid, else 1024.
    unsigned max_threads() const noexcept { return max_threads_; }
    /// .reqntid, else zeros.
    const std::array<unsigned, 3> &required_block() const noexcept { return required_block_; }
    /// .reqnctapercluster, else zeros.
    const std::array<unsigned, 3> &required_cluster() const noexcept { return required_cluster_; }
    /// Local memory of a thread that the kernel's own frame needs.
    std::size_t local_bytes() const noexcept { return local_bytes_; }
    /// An estimate of the 32-bit registers a real assembler would use: between 16 and 255.
    unsigned registers() const noexcept { return registers_; }
    const std::shared_ptr<const Module> &module() const noexcept { return module_; }
    /// For this library only: the number of the kernel's function in its module.
    std::uint32_t index() const noexcept { return index_; }

  private:
    friend class Module;

    std::shared_ptr<const Module> module_;
    std::string name_;
    std::vector<Parameter> parameters_;
    std::size_t static_shared_bytes_ = 0;
    unsigned max_threads_ = 1024;
    std::array<unsigned, 3> required_block_{};
    std::array<unsigned, 3> required_cluster_{};
    std::size_t local_bytes_ = 0;
    unsigned registers_ = 16;
    std::uint32_t index_ = 0;
};

/// A parsed module; immutable and usable from any thread.
class Module {
  public:
    /// Reads PTX text, which may end in a NUL. Instructions that are not known are kept: only a launch of a kernel that
    /// can reach one fails. Throws ParseError.
    static std::shared_ptr<const Module> parse(std::string_view text);

    ~Module();
    Module(const Module &) = delete;
    Module &operator=(const Module &) = delete;

    /// Names of the kernels (.entry), in the order of the text.
    std::vector<std::string> kernel_names() const;
    bool has_kernel(std::string_view name) const noexcept;
    /// Throws std::out_of_range when there is no such kernel.
    Kernel kernel(std::string_view name) const;
    /// Module-scope variables, in the order of the text.
    const std::vector<Variable> &globals() const noexcept;
    /// The .target, e.g. "sm_90", and the .version times ten, e.g. 90.
    const std::string &target() const noexcept;
    unsigned version() const noexcept;

    /// For this library only: what the module has been decoded into.
    Program &program() const noexcept { return *program_; }

  private:
    Module();
    std::weak_ptr<const Module> self_;
    std::unique_ptr<Program> program_;
};

/// One kernel launch. `parameters` is laid out as Kernel::parameters() says and is read during execute() only.
struct Launch {
    std::array<unsigned, 3> grid{1, 1, 1};
    std::array<unsigned, 3> block{1, 1, 1};
    std::array<unsigned, 3> cluster{1, 1, 1};
    std::size_t dynamic_shared_bytes = 0;
    const std::byte *parameters = nullptr;
    std::size_t parameters_bytes = 0;
    bool cooperative = false;
    std::uint64_t grid_id = 0;                ///< %gridid
    unsigned multiprocessor_count = 1;        ///< %nsmid
    std::size_t max_local_bytes = 512u << 10; ///< of a thread; beyond it the launch faults with out_of_memory
    unsigned max_workers = 2;                 ///< host threads at most, the calling one included
    /// Operations of warps, about, after which the launch stops with launch_timeout; 0: no bound. Unlike a time it
    /// gives the same result on every host.
    std::uint64_t max_operations = 0;
};

/// The caller's memory. All functions may be called from several host threads during one execute().
class Memory {
  public:
    /// A piece of mapped memory: [begin, end) lies at `host`.
    struct Range {
        std::uint64_t begin = 0;
        std::uint64_t end = 0;
        std::byte *host = nullptr;
    };

    virtual ~Memory() = default;

    /// Host pointer for `bytes` bytes at `address`, or nullptr when any of them may not be read (or written).
    virtual std::byte *translate(std::uint64_t address, std::size_t bytes, bool write) noexcept = 0;

    /// The largest piece known to the caller that contains `address`, stays valid for the whole of this execute() and
    /// may be read (or written, if `write`). Makes execution much faster; an empty range sends each access to
    /// translate().
    virtual Range range(std::uint64_t address, bool write) noexcept {
        (void)address;
        (void)write;
        return {};
    }

    /// Where the caller has put a variable of `module`. 0: nowhere, the launch faults.
    virtual std::uint64_t symbol_address(const Module &module, std::string_view name) = 0;

    /// Device-side malloc: an address aligned to 16 bytes that translate() accepts, or 0 when the heap is exhausted.
    virtual std::uint64_t heap_allocate(std::size_t bytes) noexcept {
        (void)bytes;
        return 0;
    }
    /// Device-side free of an address from heap_allocate. False: no such allocation.
    virtual bool heap_free(std::uint64_t address) noexcept {
        (void)address;
        return false;
    }
};

/// Sees every access to global and constant memory, in an order that is the same every time. Execution is single
/// threaded while there is an observer.
class Observer {
  public:
    enum class Kind { load, store, atomic };

    virtual ~Observer() = default;
    virtual void access(std::uint64_t address, std::uint32_t bytes, Kind kind) = 0;
};

/// Runs a kernel to its end in the calling thread, helped by at most one more that has ended on return. Results are the
/// same bytes every time for kernels without data races. Throws Fault. `cancel`, looked at every few thousand
/// instructions, stops the kernel with launch_timeout. Text printed by the kernel is appended to `printf_output`, or
/// written to stdout. The parameters, Memory and Observer are borrowed for the duration of the call.
void execute(const Kernel &kernel, const Launch &launch, Memory &memory, Observer *observer = nullptr,
             const std::atomic<bool> *cancel = nullptr, std::string *printf_output = nullptr);

/// Waits until no helper thread of any execute() is left; from then on until resume_workers() none is started. Call it
/// before a fork or before the process is checkpointed, so that no thread of this library exists.
void shutdown_workers() noexcept;
void resume_workers() noexcept;

} // namespace simgpu::ptx
