// Code as the application passes it to the driver: how long it is, its name by content, and its way to the daemon,
// which makes a catalogue of templates of it.
//
// The hand-over is a folder, kernels/ in the runtime directory, made by the daemon and its user's alone. This side puts
// KEY.image into it (KEY: BLAKE3 of the content, in hex), the daemon answers with KEY.so and then KEY.kernels, and
// removes the image. KEY.origin, if there is one, is the path of the file that the image was loaded from. Nothing here
// waits for an answer.
#pragma once

#include <cstddef>
#include <string>

namespace woodfrog::interpose::shadow {

// The key of the code at `image` (PTX text, fatbin or its wrapper, cubin), passed on to the daemon if it has not seen
// it. Empty when there can be no templates: no PTX in it, too large, or not understood.
std::string submit_image(const void *image, const char *path = nullptr); // of the file that it is from
std::string submit_file(const char *path);

// The folder, opened (the caller closes it); -1 when there is none or others may write to it.
int open_catalogue_folder();
std::string catalogue_folder();
// Whether what `fd` is open for is this user's alone to write.
bool is_private(int fd, bool folder);

} // namespace woodfrog::interpose::shadow
