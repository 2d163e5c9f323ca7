package runner

import (
	"math"
	"strings"
	"testing"
	"time"
)

func TestValidateReportsAllFaults(t *testing.T) {
	bad := Options{
		MinInterval: -5, Burst: -1, MaxInterval: -7,
		Retry: Backoff{Initial: time.Microsecond, Max: time.Nanosecond, Factor: 0.5, Jitter: 3},
	}
	_, err := New(bad, nil)
	if err == nil {
		t.Fatal("New = nil, want an error")
	}
	for _, field := range []string{"MinInterval", "Burst", "MaxInterval", "Retry.Initial", "Retry.Max", "Retry.Factor", "Retry.Jitter", "function"} {
		if !strings.Contains(err.Error(), field) {
			t.Errorf("error does not name %s: %v", field, err)
		}
	}
	if err := (Options{MinInterval: time.Hour, MaxInterval: time.Minute}).Validate(); err == nil {
		t.Error("Validate = nil, want an error: MaxInterval is below MinInterval (RUN-01)")
	}
	for field, bad := range map[string]Options{
		"Burst":        {MinInterval: time.Hour, Burst: math.MaxInt32},
		"Retry.Max":    {Retry: Backoff{Max: math.MaxInt64}},
		"Retry.Factor": {Retry: Backoff{Factor: math.NaN()}},
		"Retry.Jitter": {Retry: Backoff{Jitter: math.NaN()}},
	} {
		if err := bad.Validate(); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("Validate = %v, want an error that names %s", err, field)
		}
	}
}

// RUN-14: the parameters of kube-proxy's engines are valid.
func TestValidOptionsAreAccepted(t *testing.T) {
	for name, options := range map[string]Options{
		"zero":       {},
		"all off":    {MinInterval: Unlimited, MaxInterval: Never, Retry: Backoff{Jitter: NoJitter}},
		"periodic":   {MinInterval: time.Second, MaxInterval: time.Second},
		"Unlimited":  {MinInterval: Unlimited, Burst: math.MaxInt32},
		"kube-proxy": {MinInterval: time.Second, Burst: 1, MaxInterval: time.Hour, Retry: Backoff{Initial: 30 * time.Second, Factor: 1, Jitter: NoJitter}},
	} {
		t.Run(name, func(t *testing.T) {
			if err := options.Validate(); err != nil {
				t.Errorf("Validate = %v", err)
			}
		})
	}
}

func TestZeroFieldsTakeTheDocumentedDefaults(t *testing.T) {
	want := Options{
		MinInterval: 10 * time.Millisecond, Gather: 2 * time.Millisecond, Burst: 2, MaxInterval: time.Hour,
		Retry: Backoff{Initial: 100 * time.Millisecond, Max: 30 * time.Second, Factor: 2, Jitter: 0.2},
	}
	if got := (Options{}).WithDefaults(); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := want.WithDefaults(); got != want {
		t.Errorf("again: got %+v, want %+v", got, want)
	}
	patient := Options{Retry: Backoff{Initial: time.Minute}}
	if got := patient.WithDefaults().Retry.Max; got != time.Minute {
		t.Errorf("Max = %v beside Initial 1m, want 1m", got)
	}
}

// RUN-08: an overflow of the pause would cause a busy loop.
func TestNoPauseIsShorterThanTheFirst(t *testing.T) {
	for name, retry := range map[string]Backoff{
		"huge factor":     {Factor: 1e300},
		"infinite factor": {Factor: math.Inf(1)},
		"no growth":       {Factor: 1},
		"longest pauses":  {Initial: longest / 2, Max: longest, Factor: 3, Jitter: 1},
		"longest first":   {Initial: longest, Max: longest, Jitter: 1},
	} {
		t.Run(name, func(t *testing.T) {
			options := Options{MinInterval: Unlimited, Retry: retry}
			if err := options.Validate(); err != nil {
				t.Fatalf("Validate = %v", err)
			}
			retry = options.WithDefaults().Retry
			for n := range 100 {
				if p := retry.Pause(n + 1); p < retry.Initial || p-retry.Max > retry.Max {
					t.Fatalf("pause %d = %v, want between Initial %v and twice Max %v", n, p, retry.Initial, retry.Max)
				}
			}
		})
	}
}

func TestJitterOnlyMakesPausesLonger(t *testing.T) {
	for range 1000 {
		b := Backoff{Initial: time.Second, Max: time.Minute, Factor: 2, Jitter: 0.5}
		if p := b.Pause(1); p < time.Second || p > 1500*time.Millisecond {
			t.Fatalf("pause = %v, want 1s to 1.5s", p)
		}
	}
}
