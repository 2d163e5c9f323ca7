package canary

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
)

// The advice about the route names what lacks: a route, or descriptors.
func TestTheAdviceAboutTheRoute(t *testing.T) {
	for err, want := range map[error]string{
		syscall.ENETUNREACH: "add a default route",
		syscall.EMFILE:      "raise the limit of open files",
		syscall.ENFILE:      "raise the limit of open files",
	} {
		if got := routeAdvice(fmt.Errorf("socket: %w", err)); !strings.Contains(got, want) {
			t.Errorf("advice about %v is %q, want %q", err, got, want)
		}
	}
}
