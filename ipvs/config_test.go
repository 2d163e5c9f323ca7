package ipvs

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

func TestDefaultsAreValid(t *testing.T) {
	t.Parallel()
	c := Config{}.WithDefaults()
	if err := c.Validate(); err != nil {
		t.Errorf("Validate = %v, want nil", err)
	}
	if c.Scheduler != "rr" || c.Drain != 15*time.Minute || c.Forward != ForwardMasquerade {
		t.Errorf("defaults = %q, %v, %d; want rr, 15m and masquerading", c.Scheduler, c.Drain, c.Forward)
	}
	own := Config{Scheduler: "lc", Drain: time.Second}.WithDefaults()
	if own.Scheduler != "lc" || own.Drain != time.Second {
		t.Errorf("WithDefaults changed %q and %v, want lc and 1s", own.Scheduler, own.Drain)
	}
}

func TestValidateNamesEveryBadField(t *testing.T) {
	t.Parallel()
	c := Config{
		Config:    proxier.Config{Masquerade: proxier.Masquerade{Mark: 3}},
		Scheduler: "sixteencharacter", Forward: ForwardTunnel + 1,
		TCPTimeout: -time.Second, TCPFinTimeout: time.Millisecond, UDPTimeout: 1500 * time.Millisecond, Drain: -1,
		ExcludeCIDRs: []netip.Prefix{{}},
	}.WithDefaults()
	err := c.Validate()
	all, ok := err.(interface{ Unwrap() []error })
	if !ok {
		t.Fatalf("Validate = %v, want several errors", err)
	}
	text := err.Error()
	for _, field := range []string{"Mark", "Scheduler", "Forward", "TCPTimeout", "TCPFinTimeout", "UDPTimeout", "Drain", "ExcludeCIDRs"} {
		if !strings.Contains(text, field) {
			t.Errorf("Validate = %v, want %s named", err, field)
		}
	}
	for _, e := range all.Unwrap() {
		if !errors.Is(e, proxier.ErrInvalidConfig) {
			t.Errorf("%v is no ErrInvalidConfig", e)
		}
	}
}

func TestValidateAcceptsTheBounds(t *testing.T) {
	t.Parallel()
	c := Config{Scheduler: "fifteenletters_", Forward: ForwardTunnel, TCPTimeout: time.Second, Drain: time.Nanosecond}.WithDefaults()
	if err := c.Validate(); err != nil {
		t.Errorf("Validate = %v, want nil", err)
	}
}
