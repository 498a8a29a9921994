// The next definition that programs/next.cpp has to find.
extern "C" const char *who() {
    return "the next library";
}
