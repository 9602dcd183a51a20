// Package shared has the objects of Orrery's store: bytes that never change, in memory once for all processes that have the same.
package shared

/*
#cgo pkg-config: orrery
#include <orrery/object.h>
#include <stdlib.h>
*/
import "C"

import (
	"encoding/hex"
	"errors"
	"fmt"
	"runtime"
	"unsafe"
)

// Object is an object of the store, mapped into this process.
type Object struct {
	object *C.struct_orrery_object
	bytes  []byte
}

// Open returns the object of the bytes that a file has now. Equal files are one object, wherever they are.
func Open(path string) (*Object, error) {
	// An error is the thread's that made the call.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	object := C.orrery_object_open(name)
	if object == nil {
		return nil, fmt.Errorf("cannot share %s: %w", path, lastError())
	}
	start := C.orrery_object_map(object, 0)
	if start == nil {
		err := lastError()
		C.orrery_object_release(object)
		return nil, fmt.Errorf("cannot map the object of %s: %w", path, err)
	}
	length := int(C.orrery_object_length(object))
	return &Object{object, unsafe.Slice((*byte)(start), length)}, nil
}

// Bytes returns the bytes of the object, which are valid until Close. To write to them ends the program.
func (o *Object) Bytes() []byte {
	return o.bytes
}

// Name returns the BLAKE3 hash of the bytes.
func (o *Object) Name() string {
	var id C.struct_orrery_object_id
	C.orrery_object_identify(o.object, &id)
	return hex.EncodeToString(C.GoBytes(unsafe.Pointer(&id.bytes[0]), C.int(len(id.bytes))))
}

// Close unmaps the object and gives it back.
func (o *Object) Close() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	object := o.object
	o.object, o.bytes = nil, nil
	if C.orrery_object_release(object) != 0 {
		return lastError()
	}
	return nil
}

func lastError() error {
	return errors.New(C.GoString(C.orrery_last_error()))
}
