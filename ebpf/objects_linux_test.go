package ebpf

import (
	"encoding/binary"
	"errors"
	"testing"
)

// TestProgramsAreLittleEndian: other machines have rules alone, and each object is there for both families.
func TestProgramsAreLittleEndian(t *testing.T) {
	if err := loadable(binary.BigEndian); !errors.Is(err, errUnavailable) {
		t.Errorf("on a big-endian machine: %v, want that sockets are unavailable", err)
	}
	for _, source := range []string{"sockets", "forward", "stale"} {
		for _, addrLen := range []int{4, 16} {
			if spec, err := loadObject(source, addrLen); err != nil || len(spec.Programs) == 0 {
				t.Errorf("object %s for addresses of %d bytes: %v", source, addrLen, err)
			}
		}
	}
}
