; The way from an XLA custom call to a kernel: the handlers of the FFI target `gradsolve_llvm`.
;
; XLA calls `gradsolve_instantiate` once for each call site of a program that it loads, and `gradsolve_execute` at each
; execution. A kernel is `void kernel(ptr buffers, ptr params, i64 task, i64 worker)`. A program names it by a 64-bit
; key, which is looked up when the program is loaded: the text of a program holds no address. A call site then holds its
; kernel (see `Slot`), so that machine code outlives every program that can still run it.
;
; Structures follow xla/ffi/api/c_api.h on a little-endian 64-bit machine; versions that were not compared with that
; header are refused before anything here runs. XLA's own name stands behind each.

%Header = type { i64, ptr }                            ; struct_size, extension_start: most structures begin so
%Version = type { %Header, i32, i32 }                  ; XLA_FFI_Api_Version: 1 major, 2 minor
%Metadata = type { i64, %Version, i32, i64 }           ; XLA_FFI_Metadata: 1 version, 2 traits, 3 type of the state
%Extension = type { i64, i32, ptr, ptr }               ; XLA_FFI_Metadata_Extension: 1 type, 2 next, 3 metadata
%Buffers = type { %Header, i64, ptr, ptr }             ; XLA_FFI_Args, XLA_FFI_Rets: 1 count, 2 types, 3 buffers
%Buffer = type { %Header, i32, ptr, i64, ptr }         ; XLA_FFI_Buffer: 1 dtype, 2 data, 3 rank, 4 dims
%Attributes = type { %Header, i64, ptr, ptr, ptr }     ; XLA_FFI_Attrs: 1 count, 2 types, 3 names, sorted, 4 values
%Scalar = type { i32, ptr }                            ; XLA_FFI_Scalar: 0 dtype, 1 value
%Array = type { i32, i64, ptr }                        ; XLA_FFI_Array: 0 dtype, 1 count, 2 data
; XLA_FFI_CallFrame: 1 API, 2 context, 3 stage, 4 arguments, 5 results, 6 attributes
%Frame = type { %Header, ptr, ptr, i32, %Buffers, %Buffers, %Attributes }
%TypeInfo = type { %Header, ptr }                      ; XLA_FFI_TypeInfo: 1 deleter
%State = type { %Header, ptr, i32, ptr, ptr }          ; XLA_FFI_State_*_Args: 1 context, 2 stage, 3 type, 4 state
%Create = type { %Header, ptr, i32 }                   ; XLA_FFI_Error_Create_Args: 1 message, 2 code
%Destroy = type { %Header, ptr }                       ; XLA_FFI_Error_Destroy_Args: 1 error
%Schedule = type { %Header, ptr, ptr, ptr }            ; XLA_FFI_ThreadPool_Schedule_Args: 1 context, 2 function, 3 data
%Threads = type { %Header, ptr, ptr }                  ; XLA_FFI_ThreadPool_NumThreads_Args: 1 context, 2 place of count
; XLA_FFI_Api: 1 version, 3 functions, of which: 0 Error_Create, 2 Error_Destroy, 7 State_Set, 8 State_Get,
; 11 ThreadPool_Schedule, 12 ThreadPool_NumThreads
%Api = type { %Header, %Version, ptr, [13 x ptr] }

; A loaded kernel: 0 key, 1 address, 2 holders. Python holds what it has entered, a call site what it found. A slot that
; nobody holds is free.
%Slot = type { i64, ptr, i64 }

; An execution: 0 holders, 1 next task, 2 tasks done, 3 next worker; 4 tasks, kernel, params; 5 buffers. It is on the
; heap, because a closure may start when the execution has long ended, finds no task left, and touches nothing else.
%Work = type { i64, ptr, ptr }
%Job = type { i64, i64, i64, i64, %Work, [0 x ptr] }

@gradsolve_slots = global [4096 x %Slot] zeroinitializer
@gradsolve_version = global [2 x i32] zeroinitializer  ; of the installed API, set before the target is registered
@gradsolve_type = global i64 0                         ; XLA_FFI_TypeId of `Slot`, set by its registration
@gradsolve_type_info = global %TypeInfo { %Header { i64 24, ptr null }, ptr @gradsolve_drop }

@absent = private constant [94 x i8]
  c"a kernel of gradsolve_backend is not loaded in this process: trace the program here once more\00"
@malformed = private constant [66 x i8] c"gradsolve_llvm takes the attributes key: i64 and params: i64[>=3]\00"
@exhausted = private constant [39 x i8] c"no memory for a call of gradsolve_llvm\00"

declare ptr @gradsolve_malloc(i64)
declare void @gradsolve_free(ptr)
declare i32 @gradsolve_yield()
declare i64 @llvm.smin.i64(i64, i64)

; ---- Slots -----------------------------------------------------------------------------------------------------------

; Gives a hold back; returns how many are left. Also what XLA calls when a call site goes.
define i64 @gradsolve_drop(ptr %slot) {
  %holders = getelementptr %Slot, ptr %slot, i32 0, i32 2
  %before = atomicrmw sub ptr %holders, i64 1 acq_rel
  %left = sub i64 %before, 1
  ret i64 %left
}

; Takes a hold of a slot that somebody holds already; false if nobody does.
define internal i1 @hold(ptr %slot) {
entry:
  %holders = getelementptr %Slot, ptr %slot, i32 0, i32 2
  %first = load atomic i64, ptr %holders acquire, align 8
  br label %try
try:
  %seen = phi i64 [ %first, %entry ], [ %now, %add ]
  %free = icmp eq i64 %seen, 0
  br i1 %free, label %end, label %add
add:
  %more = add i64 %seen, 1
  %swap = cmpxchg ptr %holders, i64 %seen, i64 %more acq_rel acquire
  %now = extractvalue { i64, i1 } %swap, 0
  %done = extractvalue { i64, i1 } %swap, 1
  br i1 %done, label %end, label %try
end:
  %held = phi i1 [ false, %try ], [ true, %add ]
  ret i1 %held
}

; The slot of a key, held; null if there is none. The key is compared once more under the hold, because a free slot is
; used again.
define internal ptr @find(i64 %key) {
entry:
  br label %look
look:
  %i = phi i64 [ 0, %entry ], [ %next, %step ]
  %slot = getelementptr %Slot, ptr @gradsolve_slots, i64 %i
  %before = load atomic i64, ptr %slot monotonic, align 8
  %like = icmp eq i64 %before, %key
  br i1 %like, label %try, label %step
try:
  %held = call i1 @hold(ptr %slot)
  br i1 %held, label %check, label %step
check:
  %after = load atomic i64, ptr %slot monotonic, align 8
  %same = icmp eq i64 %after, %key
  br i1 %same, label %found, label %other
other:
  %left = call i64 @gradsolve_drop(ptr %slot)
  br label %step
step:
  %next = add i64 %i, 1
  %last = icmp eq i64 %next, 4096
  br i1 %last, label %none, label %look
found:
  ret ptr %slot
none:
  ret ptr null
}

; ---- What both handlers need -----------------------------------------------------------------------------------------

define internal ptr @context(ptr %frame) {
  %at = getelementptr %Frame, ptr %frame, i32 0, i32 2
  %context = load ptr, ptr %at
  ret ptr %context
}

; Calls a function of the API; returns the error that it returns.
define internal ptr @request(ptr %frame, i32 %function, ptr %args) {
  %at_api = getelementptr %Frame, ptr %frame, i32 0, i32 1
  %api = load ptr, ptr %at_api
  %at = getelementptr %Api, ptr %api, i32 0, i32 3, i32 %function
  %called = load ptr, ptr %at
  %error = call ptr %called(ptr %args)
  ret ptr %error
}

define internal ptr @error(ptr %frame, ptr %message, i32 %code) {
  %args = alloca %Create
  %some = insertvalue %Create { %Header { i64 28, ptr null }, ptr null, i32 0 }, ptr %message, 1
  %all = insertvalue %Create %some, i32 %code, 2
  store %Create %all, ptr %args
  %error = call ptr @request(ptr %frame, i32 0, ptr %args)
  ret ptr %error
}

; Whether an API function was refused; its error is destroyed.
define internal i1 @refused(ptr %frame, ptr %error) {
entry:
  %args = alloca %Destroy
  %fine = icmp eq ptr %error, null
  br i1 %fine, label %no, label %yes
yes:
  %all = insertvalue %Destroy { %Header { i64 24, ptr null }, ptr null }, ptr %error, 1
  store %Destroy %all, ptr %args
  %nothing = call ptr @request(ptr %frame, i32 2, ptr %args) ; void: what it seems to return is not looked at
  ret i1 true
no:
  ret i1 false
}

; Whether a handler is asked for its metadata (an extension of type 1) rather than called; answers if so.
define internal i1 @answered(ptr %frame, i64 %state_type) {
entry:
  %at = getelementptr %Header, ptr %frame, i32 0, i32 1
  %extension = load ptr, ptr %at
  %none = icmp eq ptr %extension, null
  br i1 %none, label %no, label %look
look:
  %found = load %Extension, ptr %extension
  %type = extractvalue %Extension %found, 1
  %asked = icmp eq i32 %type, 1
  br i1 %asked, label %yes, label %no
yes:
  %metadata = extractvalue %Extension %found, 3
  %at_version = getelementptr %Metadata, ptr %metadata, i32 0, i32 1, i32 1
  %version = load [2 x i32], ptr @gradsolve_version
  store [2 x i32] %version, ptr %at_version
  %at_traits = getelementptr %Metadata, ptr %metadata, i32 0, i32 2
  store i32 0, ptr %at_traits
  %at_state = getelementptr %Metadata, ptr %metadata, i32 0, i32 3
  store i64 %state_type, ptr %at_state
  ret i1 true
no:
  ret i1 false
}

; The value of attribute 0 (`key`, a scalar: type 3) or 1 (`params`, an array: type 1), null if it is not of integers.
define internal ptr @attribute(ptr %frame, i64 %i, i32 %type) {
entry:
  %at = getelementptr %Frame, ptr %frame, i32 0, i32 6
  %attributes = load %Attributes, ptr %at
  %count = extractvalue %Attributes %attributes, 1
  %types = extractvalue %Attributes %attributes, 2
  %values = extractvalue %Attributes %attributes, 4
  %two = icmp eq i64 %count, 2
  br i1 %two, label %look, label %no
look:
  %at_type = getelementptr i32, ptr %types, i64 %i
  %found = load i32, ptr %at_type
  %right = icmp eq i32 %found, %type
  br i1 %right, label %open, label %no
open:
  %at_value = getelementptr ptr, ptr %values, i64 %i
  %value = load ptr, ptr %at_value
  %dtype = load i32, ptr %value
  %integer = icmp eq i32 %dtype, 5 ; XLA_FFI_DataType_S64
  br i1 %integer, label %yes, label %no
yes:
  ret ptr %value
no:
  ret ptr null
}

; The arguments of State_Set and State_Get. The stage (2) is 0: XLA_FFI_ExecutionStage_INSTANTIATE makes the state.
define internal void @fill_state(ptr %frame, ptr %args, ptr %slot) {
  %context = call ptr @context(ptr %frame)
  %some = insertvalue %State { %Header { i64 48, ptr null }, ptr null, i32 0, ptr @gradsolve_type, ptr null },
    ptr %context, 1
  %all = insertvalue %State %some, ptr %slot, 4
  store %State %all, ptr %args
  ret void
}

; ---- Loading a program -----------------------------------------------------------------------------------------------

define ptr @gradsolve_instantiate(ptr %frame) {
entry:
  %args = alloca %State
  %type = load i64, ptr @gradsolve_type
  %asked = call i1 @answered(ptr %frame, i64 %type)
  br i1 %asked, label %fine, label %read
read:
  %scalar = call ptr @attribute(ptr %frame, i64 0, i32 3)
  %wrong = icmp eq ptr %scalar, null
  br i1 %wrong, label %malformed, label %search
search:
  %at_value = getelementptr %Scalar, ptr %scalar, i32 0, i32 1
  %value = load ptr, ptr %at_value
  %key = load i64, ptr %value
  %slot = call ptr @find(i64 %key)
  %none = icmp eq ptr %slot, null
  br i1 %none, label %absent, label %keep
keep:
  call void @fill_state(ptr %frame, ptr %args, ptr %slot)
  %error = call ptr @request(ptr %frame, i32 7, ptr %args)
  %kept = icmp eq ptr %error, null
  br i1 %kept, label %fine, label %release
release:
  %left = call i64 @gradsolve_drop(ptr %slot)
  ret ptr %error
malformed:
  %error_malformed = call ptr @error(ptr %frame, ptr @malformed, i32 3) ; INVALID_ARGUMENT
  ret ptr %error_malformed
absent:
  %error_absent = call ptr @error(ptr %frame, ptr @absent, i32 9) ; FAILED_PRECONDITION
  ret ptr %error_absent
fine:
  ret ptr null
}

; ---- Running a kernel ------------------------------------------------------------------------------------------------

; Takes tasks until there is none.
define internal void @work(ptr %job, i64 %worker) {
entry:
  %at_next = getelementptr %Job, ptr %job, i32 0, i32 1
  %at_done = getelementptr %Job, ptr %job, i32 0, i32 2
  %at_work = getelementptr %Job, ptr %job, i32 0, i32 4
  %buffers = getelementptr %Job, ptr %job, i32 0, i32 5
  %work = load %Work, ptr %at_work
  %tasks = extractvalue %Work %work, 0
  %kernel = extractvalue %Work %work, 1
  %params = extractvalue %Work %work, 2
  br label %next
next:
  %task = atomicrmw add ptr %at_next, i64 1 monotonic
  %any = icmp slt i64 %task, %tasks
  br i1 %any, label %run, label %end
run:
  call void %kernel(ptr %buffers, ptr %params, i64 %task, i64 %worker)
  %before = atomicrmw add ptr %at_done, i64 1 release ; publishes what the kernel wrote to the one that waits
  br label %next
end:
  ret void
}

; Gives a hold of a job back; the last one frees it.
define internal void @leave(ptr %job) {
entry:
  %holders = atomicrmw sub ptr %job, i64 1 acq_rel
  %last = icmp eq i64 %holders, 1
  br i1 %last, label %free, label %end
free:
  call void @gradsolve_free(ptr %job)
  br label %end
end:
  ret void
}

; The closure that a thread of XLA's pool runs.
define internal void @help(ptr %job) {
  %at_worker = getelementptr %Job, ptr %job, i32 0, i32 3
  %worker = atomicrmw add ptr %at_worker, i64 1 monotonic
  call void @work(ptr %job, i64 %worker)
  call void @leave(ptr %job)
  ret void
}

; How many threads may help: fewer than there are tasks (params 0), workers (params 1), and threads in XLA's pool, for
; one of which the calling thread stands; none if params 2 is 0 or the API is older than its thread pool.
define internal i64 @other_threads(ptr %frame, ptr %params) {
entry:
  %threads = alloca i64
  %args = alloca %Threads
  store i64 1, ptr %threads
  %at_api = getelementptr %Frame, ptr %frame, i32 0, i32 1
  %api = load ptr, ptr %at_api
  %size = load i64, ptr %api
  %long = icmp uge i64 %size, ptrtoint (ptr getelementptr (%Api, ptr null, i32 1) to i64)
  %given = load [3 x i64], ptr %params
  %tasks = extractvalue [3 x i64] %given, 0
  %workers = extractvalue [3 x i64] %given, 1
  %allowed = extractvalue [3 x i64] %given, 2
  %least = call i64 @llvm.smin.i64(i64 %tasks, i64 %workers)
  %several = icmp sgt i64 %least, 1
  %may = icmp ne i64 %allowed, 0
  %sensible = and i1 %several, %may
  %wanted = and i1 %sensible, %long
  br i1 %wanted, label %ask, label %alone
ask:
  %context = call ptr @context(ptr %frame)
  %some = insertvalue %Threads { %Header { i64 32, ptr null }, ptr null, ptr null }, ptr %context, 1
  %all = insertvalue %Threads %some, ptr %threads, 2
  store %Threads %all, ptr %args
  %error = call ptr @request(ptr %frame, i32 12, ptr %args)
  %refused = call i1 @refused(ptr %frame, ptr %error)
  br i1 %refused, label %alone, label %count
count:
  %pool = load i64, ptr %threads
  %fewest = call i64 @llvm.smin.i64(i64 %least, i64 %pool)
  %others = sub i64 %fewest, 1
  ret i64 %others
alone:
  ret i64 0
}

; Hands closures to XLA's pool, until one is refused.
define internal void @invite(ptr %frame, ptr %job, i64 %others) {
entry:
  %args = alloca %Schedule
  %context = call ptr @context(ptr %frame)
  %some = insertvalue %Schedule { %Header { i64 40, ptr null }, ptr null, ptr @help, ptr null }, ptr %context, 1
  %all = insertvalue %Schedule %some, ptr %job, 3
  store %Schedule %all, ptr %args
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %more, %schedule ]
  %any = icmp slt i64 %i, %others
  br i1 %any, label %schedule, label %end
schedule:
  %more = add i64 %i, 1
  %before = atomicrmw add ptr %job, i64 1 monotonic ; the hold of the closure
  %error = call ptr @request(ptr %frame, i32 11, ptr %args)
  %refused = call i1 @refused(ptr %frame, ptr %error)
  br i1 %refused, label %undo, label %next
undo:
  call void @leave(ptr %job)
  br label %end
end:
  ret void
}

; Writes the data pointers of arguments or results behind one another; returns the place behind the last.
define internal ptr @put(%Buffers %list, ptr %place) {
entry:
  %count = extractvalue %Buffers %list, 1
  %buffers = extractvalue %Buffers %list, 3
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %more, %copy ]
  %to = getelementptr ptr, ptr %place, i64 %i
  %any = icmp slt i64 %i, %count
  br i1 %any, label %copy, label %end
copy:
  %from = getelementptr ptr, ptr %buffers, i64 %i
  %buffer = load ptr, ptr %from
  %at_data = getelementptr %Buffer, ptr %buffer, i32 0, i32 2
  %data = load ptr, ptr %at_data
  store ptr %data, ptr %to
  %more = add i64 %i, 1
  br label %next
end:
  ret ptr %to
}

; A job with one holder, the caller, who is worker 0; null if there is no memory.
define internal ptr @new_job(ptr %frame, %Work %work) {
entry:
  %at_arguments = getelementptr %Frame, ptr %frame, i32 0, i32 4
  %at_results = getelementptr %Frame, ptr %frame, i32 0, i32 5
  %arguments = load %Buffers, ptr %at_arguments
  %results = load %Buffers, ptr %at_results
  %argument_count = extractvalue %Buffers %arguments, 1
  %result_count = extractvalue %Buffers %results, 1
  %count = add i64 %argument_count, %result_count
  %end = getelementptr %Job, ptr null, i32 0, i32 5, i64 %count
  %size = ptrtoint ptr %end to i64
  %job = call ptr @gradsolve_malloc(i64 %size)
  %none = icmp eq ptr %job, null
  br i1 %none, label %return, label %fill
fill:
  %head = insertvalue %Job { i64 1, i64 0, i64 0, i64 1, %Work zeroinitializer, [0 x ptr] zeroinitializer },
    %Work %work, 4
  store %Job %head, ptr %job
  %buffers = getelementptr %Job, ptr %job, i32 0, i32 5
  %behind = call ptr @put(%Buffers %arguments, ptr %buffers)
  %last = call ptr @put(%Buffers %results, ptr %behind)
  br label %return
return:
  ret ptr %job
}

; Waits for the tasks that others have taken. All are taken by now, and who took one is running it, so that this ends.
; Closures are not waited for: where each thread of the pool waits here, they do not start.
define internal void @wait(ptr %job, i64 %tasks) {
entry:
  %at_done = getelementptr %Job, ptr %job, i32 0, i32 2
  br label %look
look:
  %done = load atomic i64, ptr %at_done acquire, align 8
  %all = icmp sge i64 %done, %tasks
  br i1 %all, label %end, label %yield
yield:
  %ignored = call i32 @gradsolve_yield()
  br label %look
end:
  ret void
}

define ptr @gradsolve_execute(ptr %frame) {
entry:
  %args = alloca %State
  %asked = call i1 @answered(ptr %frame, i64 0)
  br i1 %asked, label %fine, label %read
read:
  %at_array = call ptr @attribute(ptr %frame, i64 1, i32 1)
  %wrong = icmp eq ptr %at_array, null
  br i1 %wrong, label %malformed, label %measure
measure:
  %array = load %Array, ptr %at_array
  %count = extractvalue %Array %array, 1
  %short = icmp ult i64 %count, 3
  br i1 %short, label %malformed, label %get
get:
  call void @fill_state(ptr %frame, ptr %args, ptr null)
  %error = call ptr @request(ptr %frame, i32 8, ptr %args)
  %got = icmp eq ptr %error, null
  br i1 %got, label %start, label %return
return:
  ret ptr %error
start:
  %params = extractvalue %Array %array, 2
  %tasks = load i64, ptr %params
  %at_slot = getelementptr %State, ptr %args, i32 0, i32 4
  %slot = load ptr, ptr %at_slot
  %at_kernel = getelementptr %Slot, ptr %slot, i32 0, i32 1
  %kernel = load ptr, ptr %at_kernel
  %what = insertvalue %Work zeroinitializer, i64 %tasks, 0
  %by = insertvalue %Work %what, ptr %kernel, 1
  %work = insertvalue %Work %by, ptr %params, 2
  %job = call ptr @new_job(ptr %frame, %Work %work)
  %none = icmp eq ptr %job, null
  br i1 %none, label %exhausted, label %run
run:
  %others = call i64 @other_threads(ptr %frame, ptr %params)
  call void @invite(ptr %frame, ptr %job, i64 %others)
  call void @work(ptr %job, i64 0)
  call void @wait(ptr %job, i64 %tasks)
  call void @leave(ptr %job)
  br label %fine
malformed:
  %error_malformed = call ptr @error(ptr %frame, ptr @malformed, i32 3) ; INVALID_ARGUMENT
  ret ptr %error_malformed
exhausted:
  %error_exhausted = call ptr @error(ptr %frame, ptr @exhausted, i32 8) ; RESOURCE_EXHAUSTED
  ret ptr %error_exhausted
fine:
  ret ptr null
}
