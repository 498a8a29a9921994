// The Python side of wire.h: the message tables as plain data, so that woodfrog.target.link packs and unpacks with
// exactly the layouts the interposer was compiled with. It must hold no logic of its own.
#include "wire.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

namespace nb = nanobind;

namespace {

void add_field(nb::list &names, std::string &format, const char *name, const char *code) {
    names.append(nb::str(name));
    format += code;
}

#define ADD_FIELD(name, type, length, code) add_field(names, format, #name, code);
#define DEFINE_LAYOUT(layout)                                                                                          \
    nb::tuple layout_##layout() {                                                                                      \
        [[maybe_unused]] nb::list names;                                                                               \
        std::string format = "<";                                                                                      \
        WF_FIELDS_##layout(ADD_FIELD) return nb::make_tuple(format, nb::tuple(names));                                 \
    }
DEFINE_LAYOUT(header)
DEFINE_LAYOUT(empty)
DEFINE_LAYOUT(hello)
DEFINE_LAYOUT(quiesce)
DEFINE_LAYOUT(control)
DEFINE_LAYOUT(reply)
DEFINE_LAYOUT(survey)
DEFINE_LAYOUT(device)
DEFINE_LAYOUT(handle)
DEFINE_LAYOUT(mapping)
DEFINE_LAYOUT(image)
DEFINE_LAYOUT(follow)
DEFINE_LAYOUT(tracking)
DEFINE_LAYOUT(dirty)
DEFINE_LAYOUT(kernel)
DEFINE_LAYOUT(shared)
DEFINE_LAYOUT(guarded)
DEFINE_LAYOUT(spent)

} // namespace

NB_MODULE(wire, m) {
    m.doc() = "The message tables of native/wire/wire.h: layouts are (struct format, field names).";
    m.attr("MAGIC") = WF_WIRE_MAGIC;
    m.attr("VERSION") = WF_WIRE_VERSION;
    m.attr("MAX_MESSAGE") = WF_MAX_MESSAGE;
    m.attr("MAX_ENTRIES") = WF_MAX_ENTRIES;
    m.attr("AGENT_THREAD_NAME") = WF_AGENT_THREAD_NAME;
    m.attr("WAKE_SIGNAL_OFFSET") = WF_WAKE_SIGNAL_OFFSET;
    m.attr("FLAG_LAST") = WF_FLAG_LAST;
    m.attr("FLAG_SAME") = WF_FLAG_SAME;
    m.attr("CONTROL_WITHDRAW") = WF_CONTROL_WITHDRAW;
    m.attr("CONTROL_OWN") = WF_CONTROL_OWN;
    m.attr("CONTROL_ASK") = WF_CONTROL_ASK;
    m.attr("CONTROL_SHARED") = WF_CONTROL_SHARED;
    m.attr("HEADER") = layout_header();

    nb::dict states, statuses, kinds, spendings, obstacles, messages;
#define ADD_STATE(name, value) states[#name] = value;
#define ADD_STATUS(name, value) statuses[#name] = value;
#define ADD_KIND(name, value) kinds[#name] = value;
#define ADD_SPENDING(name, value) spendings[#name] = value;
#define ADD_OBSTACLE(name, bit) obstacles[#name] = 1u << bit;
#define ADD_MESSAGE(name, number, body, entry, from)                                                                   \
    messages[#name] = nb::make_tuple(number, layout_##body(), layout_##entry(), from);
    WF_STATES(ADD_STATE)
    WF_STATUSES(ADD_STATUS)
    WF_KINDS(ADD_KIND)
    WF_SPENDINGS(ADD_SPENDING)
    WF_OBSTACLES(ADD_OBSTACLE)
    WF_MESSAGES(ADD_MESSAGE)
    m.attr("STATES") = states;
    m.attr("STATUSES") = statuses;
    m.attr("KINDS") = kinds;
    m.attr("SPENDINGS") = spendings;
    m.attr("OBSTACLES") = obstacles;
    m.attr("MESSAGES") = messages; // name -> (number, body layout, entry layout, sender)
}
