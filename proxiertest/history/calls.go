package history

import (
	"errors"
	"sync"
)

// Calls stands between an engine and the kernel. Both families of a Provider share it.
type Calls struct {
	mu      sync.Mutex
	made    int
	dead    bool
	planned []intervention
	fired   int
}

// intervention is what happens at one call to the kernel.
type intervention struct {
	// Call counts the calls before it, from when it is planned.
	Call int
	// Before and After, unless nil, run before and after the call.
	Before, After func()
	// Err, unless nil, is the call's error. If it is Late, the kernel has done what the call
	// asked for, and only the answer is lost.
	Err  error
	Late bool
	// Hang means that the call gives no answer until its time is over. A call that has no such
	// time fails with Err.
	Hang bool
	// Kill means that the process dies at the call: before the kernel does anything, or after
	// it if Late.
	Kill bool
}

// errDead is the error of each call of a process that was killed.
var errDead = errors.New("the process is dead")

// plan adds an intervention.
func (c *Calls) plan(i intervention) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i.Call += c.made
	c.planned = append(c.planned, i)
}

// cancel forgets the interventions that have not happened.
func (c *Calls) cancel() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.planned = nil
}

// happened returns how many interventions have happened.
func (c *Calls) happened() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fired
}

// Dead reports whether an intervention has killed the process.
func (c *Calls) Dead() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dead
}

// Do makes a call to the kernel, or lets it fail.
func (c *Calls) Do(call func() error) error { return c.DoOrHang(call, nil) }

// DoOrHang is Do for a call that may hang: then hang is called instead.
func (c *Calls) DoOrHang(call, hang func() error) error {
	now, dead := c.next()
	if dead {
		return errDead
	}
	for _, i := range now {
		if i.Before != nil {
			i.Before()
		}
		if i.After != nil {
			defer i.After()
		}
	}
	for _, i := range now {
		if i.Hang && hang != nil {
			return hang()
		}
		if err := i.error(); err != nil {
			if i.Late {
				_ = call() // its answer is lost
			}
			return err
		}
	}
	return call()
}

func (i *intervention) error() error {
	if i.Kill {
		return errDead
	}
	return i.Err
}

// next counts a call, and takes the interventions that are due.
func (c *Calls) next() (now []intervention, dead bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead {
		return nil, true
	}
	var later []intervention
	for _, i := range c.planned {
		if i.Call > c.made {
			later = append(later, i)
			continue
		}
		now = append(now, i)
		c.dead = c.dead || i.Kill
		c.fired++
	}
	c.planned = later
	c.made++
	return now, false
}
