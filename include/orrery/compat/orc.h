/*
 * Orrery's shared objects under the names of "ORC: Increasing Cloud Memory Density via Object Reuse with Capabilities" (Sartakov
 * et al., OSDI 2023).
 *
 * Each name stands for one of orrery/object.h, which documents it; names that the paper does not have are formed like its own.
 * New programs use that header. The paper's compartment-local storage is orrery/instance.h: code that the pass compiles finds it
 * by itself, so nothing stands for _cls_get_addr.
 */
#ifndef ORRERY_COMPAT_ORC_H
#define ORRERY_COMPAT_ORC_H

#include <orrery/object.h>

#define orc_object orrery_object
#define orc_object_id orrery_object_id
#define orc_error orrery_last_error
#define orc_connect orrery_object_connect
#define orc_hash orrery_object_hash
#define orc_register orrery_object_register
#define orc_register_file orrery_object_register_file
#define orc_open orrery_object_open
#define orc_request orrery_object_request
#define orc_map orrery_object_map
#define orc_length orrery_object_length
#define orc_identify orrery_object_identify
#define orc_fd orrery_object_fd
#define orc_release orrery_object_release
#define orc_publish orrery_object_publish
#define ORC_EXECUTABLE ORRERY_OBJECT_EXECUTABLE
#define ORC_PUBLIC ORRERY_OBJECT_PUBLIC
#define ORC_OWN_PAGES ORRERY_OBJECT_OWN_PAGES
#define ORC_FREEZE ORRERY_OBJECT_FREEZE

#endif
