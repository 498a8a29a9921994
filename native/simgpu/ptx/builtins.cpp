// printf, assert, malloc and free on the device; see builtins.hpp. Format strings and their arguments come from kernels
// and are never handed to the host's printf as they are.
#include "builtins.hpp"

#include <cstdio>
#include <cstring>

#include "addressing.hpp"
#include "decode.hpp"

namespace simgpu::ptx {

namespace {

constexpr std::size_t longest_string = 64 * 1024;
constexpr int widest_field = 4096;

template <class T> T read_value(Warp &warp, const Op &op, unsigned lane, std::uint64_t address) {
    T value;
    std::memcpy(&value, resolve(warp, op, lane, address, sizeof value, Access::load), sizeof value);
    return value;
}

std::string read_string(Warp &warp, const Op &op, unsigned lane, std::uint64_t address) {
    std::string text;
    while (text.size() < longest_string) {
        const char c = read_value<char>(warp, op, lane, address + text.size());
        if (c == '\0')
            break;
        text += c;
    }
    return text;
}

std::uint64_t argument(Warp &warp, unsigned lane, const Slot &slot) {
    const Frame &frame = *warp.frame;
    const std::byte *from = slot.is_register ? frame.rows.get() + slot.offset + std::size_t{lane} * slot.size_bytes
                                             : warp.local_memory(lane) + frame.local_base[lane] + slot.offset;
    std::uint64_t value = 0;
    std::memcpy(&value, from, slot.size_bytes < 8 ? slot.size_bytes : 8);
    return value;
}

void set_result(Warp &warp, unsigned lane, const CallSite &site, std::uint64_t value) {
    if (site.results.empty())
        return;
    const Slot &slot = site.results.front();
    Frame &frame = *warp.frame;
    std::byte *into = slot.is_register ? frame.rows.get() + slot.offset + std::size_t{lane} * slot.size_bytes
                                       : warp.local_memory(lane) + frame.local_base[lane] + slot.offset;
    std::memcpy(into, &value, slot.size_bytes < 8 ? slot.size_bytes : 8);
}

/// Walks the argument buffer, in which every value is aligned to its own size.
class Arguments {
  public:
    Arguments(Warp &warp, const Op &op, unsigned lane, std::uint64_t address)
        : warp_(warp), op_(op), lane_(lane), at_(address) {}

    template <class T> T take() {
        at_ = (at_ + sizeof(T) - 1) & ~std::uint64_t{sizeof(T) - 1};
        const T value = read_value<T>(warp_, op_, lane_, at_);
        at_ += sizeof(T);
        return value;
    }

  private:
    Warp &warp_;
    const Op &op_;
    unsigned lane_;
    std::uint64_t at_;
};

template <class T> void append(std::string &out, const std::string &specification, T value) {
    char small[512];
    const int length = std::snprintf(small, sizeof small, specification.c_str(), value);
    if (length < 0)
        return;
    if (static_cast<std::size_t>(length) < sizeof small) {
        out.append(small, static_cast<std::size_t>(length));
        return;
    }
    std::string large(static_cast<std::size_t>(length) + 1, '\0');
    std::snprintf(large.data(), large.size(), specification.c_str(), value);
    large.pop_back();
    out += large;
}

// A specification is rebuilt from checked parts, so that the host's printf sees only what fits the value it is given.
std::string format(Warp &warp, const Op &op, unsigned lane, const std::string &text, std::uint64_t buffer, int &count) {
    std::string out;
    Arguments arguments(warp, op, lane, buffer);
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] != '%') {
            out += text[i];
            continue;
        }
        const std::size_t start = i++;
        if (i < text.size() && text[i] == '%') {
            out += '%';
            continue;
        }
        std::string specification = "%";
        while (i < text.size() && std::strchr("-+ #0", text[i]) != nullptr)
            specification += text[i++];
        const auto field = [&] {
            if (i < text.size() && text[i] == '*') {
                ++i;
                int value = arguments.take<std::int32_t>();
                value = value > widest_field ? widest_field : value < -widest_field ? -widest_field : value;
                specification += std::to_string(value);
                return;
            }
            int value = 0;
            bool any = false;
            for (; i < text.size() && text[i] >= '0' && text[i] <= '9'; ++i, any = true)
                value = value * 10 + (text[i] - '0') > widest_field ? widest_field : value * 10 + (text[i] - '0');
            if (any)
                specification += std::to_string(value);
        };
        field();
        if (i < text.size() && text[i] == '.') {
            specification += '.';
            ++i;
            field();
        }
        int wide = 0;
        while (i < text.size() && std::strchr("hlLqjzt", text[i]) != nullptr) {
            if (text[i] == 'l' || text[i] == 'q' || text[i] == 'j' || text[i] == 'z' || text[i] == 't')
                wide = 1;
            ++i;
        }
        const char conversion = i < text.size() ? text[i] : '\0';
        switch (conversion) {
        case 'd':
        case 'i':
            if (wide != 0)
                append(out, specification + "lld", arguments.take<long long>());
            else
                append(out, specification + conversion, arguments.take<std::int32_t>());
            break;
        case 'u':
        case 'x':
        case 'X':
        case 'o':
            if (wide != 0)
                append(out, specification + "ll" + conversion, arguments.take<unsigned long long>());
            else
                append(out, specification + conversion, arguments.take<std::uint32_t>());
            break;
        case 'c':
            append(out, specification + 'c', arguments.take<std::int32_t>());
            break;
        case 'f':
        case 'F':
        case 'e':
        case 'E':
        case 'g':
        case 'G':
        case 'a':
        case 'A':
            append(out, specification + conversion, arguments.take<double>());
            break;
        case 'p':
            append(out, std::string("0x%llx"), arguments.take<unsigned long long>());
            break;
        case 's': {
            const auto address = arguments.take<std::uint64_t>();
            const std::string value = address != 0 ? read_string(warp, op, lane, address) : "(null)";
            append(out, specification + 's', value.c_str());
            break;
        }
        default:
            // Not a conversion that exists: print it as it stands, as the GPU does.
            out.append(text, start, i - start + 1);
            continue;
        }
        ++count;
    }
    return out;
}

void print(Warp &warp, const Op &op, unsigned lane, const CallSite &site) {
    const std::string text = read_string(warp, op, lane, argument(warp, lane, site.arguments[0]));
    int count = 0;
    const std::string out = format(warp, op, lane, text, argument(warp, lane, site.arguments[1]), count);
    if (warp.context->printf_output != nullptr)
        *warp.context->printf_output += out;
    else
        std::fwrite(out.data(), 1, out.size(), stdout);
    set_result(warp, lane, site, static_cast<std::uint64_t>(count));
}

[[noreturn]] void fail_assertion(Warp &warp, const Op &op, unsigned lane, const CallSite &site) {
    const std::string expression = read_string(warp, op, lane, argument(warp, lane, site.arguments[0]));
    const std::string file = read_string(warp, op, lane, argument(warp, lane, site.arguments[1]));
    const std::uint64_t line = argument(warp, lane, site.arguments[2]) & 0xffffffff;
    const std::string function = read_string(warp, op, lane, argument(warp, lane, site.arguments[3]));
    warp.fault(Fault::Kind::assert_failed, op, lane, 0,
               file + ":" + std::to_string(line) + ": " + function + ": `" + expression + "`");
}

} // namespace

void check_builtin(const CallSite &site) {
    std::size_t arguments = 0;
    switch (site.builtin) {
    case Builtin::vprintf:
        arguments = 2;
        break;
    case Builtin::assert_fail:
        arguments = 5;
        break;
    case Builtin::heap_allocate:
    case Builtin::heap_free:
        arguments = 1;
        break;
    case Builtin::none:
        break;
    }
    require(site.arguments.size() == arguments, "a call with another number of arguments");
}

void run_builtin(Warp &warp, const Op &op, Mask mask, const CallSite &site) {
    each_lane(mask, [&](unsigned lane) {
        switch (site.builtin) {
        case Builtin::vprintf:
            print(warp, op, lane, site);
            break;
        case Builtin::assert_fail:
            fail_assertion(warp, op, lane, site);
        case Builtin::heap_allocate:
            set_result(warp, lane, site, warp.context->memory.heap_allocate(argument(warp, lane, site.arguments[0])));
            break;
        case Builtin::heap_free: {
            const std::uint64_t address = argument(warp, lane, site.arguments[0]);
            if (address != 0 && !warp.context->memory.heap_free(address))
                warp.fault(Fault::Kind::illegal_address, op, lane, address, "free of what malloc did not return");
            break;
        }
        case Builtin::none:
            break;
        }
    });
}

} // namespace simgpu::ptx
